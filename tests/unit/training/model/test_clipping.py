"""Clipping within the optimizer's own kernel, where it has a place for it, is the same step."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from unit.training.model.plans import hand_plan
from unit.training.model.steps import Counted

from eke.training.model.number_formats import build_with_master
from eke.training.optimizer.update import PlainUpdate

MAX_NORM = 0.5
PLAN = hand_plan(f"train.max_grad_norm={MAX_NORM}")

adamw = partial(torch.optim.AdamW, lr=1e-2)
sgd = partial(torch.optim.SGD, lr=1e-2, momentum=0.9)
IN_KERNEL = {"adamw": partial(adamw, fused=True), "sgd": partial(sgd, fused=True)}
APART = {"adamw": partial(adamw, foreach=True), "sgd": sgd}


def several(plan):
    """The same by two processes."""
    return replace(plan, batch=replace(plan.batch, world_size=2))


def make(build, plan=PLAN, scaler=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    optimizer = build(model.parameters())
    return model, PlainUpdate(plan, model, optimizer, scaler, list(model.parameters()))


def train(model, apply, sizes):
    """Steps with gradients of these sizes; the norms they had."""
    norms = []
    for seed, size in enumerate(sizes):
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.grad = size * torch.randn(parameter.shape, generator=generator)
        norms.append(float(apply()))
    return norms


def reference(build, sizes):
    """What PyTorch's own way, clipping apart, makes of the same gradients."""
    model, update = make(build)

    def apply():
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        update.optimizer.step()
        return norm

    return model, train(model, apply, sizes)


@pytest.mark.parametrize(
    "build",
    [*IN_KERNEL.values(), *APART.values()],
    ids=[*(f"{name} fused" for name in IN_KERNEL), *APART],
)
def test_fused_clipping_matches_separate_clipping(build) -> None:
    sizes = [10.0, 0.001, 1e6, 3.0, 0.05]
    model, update = make(build)
    expected, norms = reference(build, sizes)
    assert train(model, update.apply, sizes) == norms
    assert max(norms) > MAX_NORM > min(norms)
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("build", IN_KERNEL.values(), ids=IN_KERNEL)
def test_unclipped_steps_are_bit_exact(build) -> None:
    sizes = [0.01, 0.02, 0.005]
    model, update = make(build)
    expected, norms = reference(build, sizes)
    assert train(model, update.apply, sizes) == norms
    assert max(norms) < MAX_NORM
    assert all(map(torch.equal, model.parameters(), expected.parameters()))


@pytest.mark.parametrize("build", IN_KERNEL.values(), ids=IN_KERNEL)
def test_fused_clipping_needs_no_extra_pass(build) -> None:
    model, update = make(build)
    with Counted() as seen:
        train(model, update.apply, [10.0])
    assert not {"_foreach_mul_", "mul_"} & set(seen.names)
    assert any(name.startswith("_fused") for name in seen.names)


@pytest.mark.parametrize("size", [float("nan"), float("inf")])
def test_non_finite_gradient_is_not_hidden(size) -> None:
    model, update = make(IN_KERNEL["sgd"])
    expected, _ = reference(IN_KERNEL["sgd"], [size])
    train(model, update.apply, [size])
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine.isnan(), theirs.isnan())
        assert mine.isnan().any()


def test_master_copies_are_clipped() -> None:
    """Clipping bfloat16 gradients apart would round each of them once more."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 64, dtype=torch.bfloat16)
    optimizer = build_with_master([{"params": list(layer.parameters())}], IN_KERNEL["sgd"])
    wide = copy.deepcopy(layer).float()
    other = IN_KERNEL["sgd"](wide.parameters())
    update = PlainUpdate(PLAN, layer, optimizer, None, list(layer.parameters()))
    for mine, theirs in zip(layer.parameters(), wide.parameters(), strict=True):
        mine.grad = torch.randn_like(mine)
        theirs.grad = mine.grad.float()
    nn.utils.clip_grad_norm_(wide.parameters(), MAX_NORM)
    other.step()
    update.apply()
    copies = optimizer.state_dict()["master"]
    for mine, theirs in zip(copies, wide.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("plan", "scaler"),
    [
        (PLAN, torch.amp.GradScaler("cpu")),
        (several(hand_plan("train.max_grad_norm=0.5", "distributed=fsdp")), None),
    ],
    ids=["loss scaling", "fsdp"],
)
def test_fused_clipping_is_skipped_with_a_loss_scaler(plan, scaler) -> None:
    _, update = make(IN_KERNEL["adamw"], plan, scaler)
    assert not update.clips_in_step
    assert make(IN_KERNEL["adamw"])[1].clips_in_step


@pytest.mark.parametrize(("plan", "factor"), [(PLAN, 1), (several(PLAN), 2)], ids=["one", "two"])
def test_averaging_ranks_sum_gradients(plan, factor) -> None:
    """DistributedDataParallel divides by the number of processes; the loss is a sum."""
    model, update = make(IN_KERNEL["sgd"], plan)
    update.backward(model[0].bias.sum(), 4)
    assert torch.equal(model[0].bias.grad, torch.full((5,), factor / 4))
