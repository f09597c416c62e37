"""Float32 copies of bfloat16 weights: what the optimizer steps on, and what becomes of it."""

import copy

import pytest
import torch
from torch import nn
from unit.training.model.steps import Counted

import eke.training.model.number_formats as master_copies
from eke.training.model.number_formats import MASTER, build_with_master, master_bytes
from eke.training.optimizer.update import norm_in_float32

TINY_STEP = 1e-4
"""Below 2^-9: a bfloat16 weight of 1 does not move."""


def adamw(groups):
    return torch.optim.AdamW(groups, lr=TINY_STEP, weight_decay=0.0)


def make(master=True, build=adamw):
    layer = nn.Linear(4, 3, dtype=torch.bfloat16)
    nn.init.ones_(layer.weight)
    groups = [{"params": [layer.weight]}, {"params": [layer.bias], "lr": 2 * TINY_STEP}]
    return layer, build_with_master(groups, build) if master else build(groups)


def step(layer, optimizer, times=1):
    for _ in range(times):
        layer.weight.grad = torch.ones_like(layer.weight)
        layer.bias.grad = torch.ones_like(layer.bias)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@pytest.mark.parametrize(("master", "moved"), [(False, 0.0), (True, 100 * TINY_STEP)])
def test_small_updates_accumulate_only_in_master_copies(master, moved) -> None:
    layer, optimizer = make(master)
    step(layer, optimizer, times=100)
    assert layer.weight.dtype == torch.bfloat16
    assert 1 - layer.weight[0, 0].item() == pytest.approx(moved, abs=2**-9)
    assert (layer.weight[0, 0].item() < 1) == master


def test_master_steps_match_float32_with_rounded_gradients() -> None:
    layer, optimizer = make()
    wide = nn.Linear(4, 3)
    wide.load_state_dict({k: v.float() for k, v in layer.state_dict().items()})
    other = adamw([{"params": [wide.weight]}, {"params": [wide.bias], "lr": 2 * TINY_STEP}])
    for _ in range(5):
        for mine, theirs in zip(layer.parameters(), wide.parameters(), strict=True):
            mine.grad = torch.randn_like(mine)
            theirs.grad = mine.grad.float()
        optimizer.step()
        other.step()
        for mine, theirs in zip(layer.parameters(), wide.parameters(), strict=True):
            assert torch.equal(mine, theirs.bfloat16())
    assert torch.equal(optimizer.state_dict()[MASTER][0], wide.weight)


def test_weight_without_gradient_is_unchanged() -> None:
    layer, optimizer = make()
    before = layer.bias.detach().clone()
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()
    assert torch.equal(layer.bias, before)


def test_master_copies_are_saved_and_restored() -> None:
    layer, optimizer = make()
    step(layer, optimizer, times=3)
    saved = copy.deepcopy(optimizer.state_dict())  # loading shares tensors, a file does not
    weights = {k: v.clone() for k, v in layer.state_dict().items()}
    other, other_optimizer = make()
    other.load_state_dict(weights)
    other_optimizer.load_state_dict(saved)
    assert MASTER in saved, "loading takes nothing from what was saved"
    for each in ((layer, optimizer), (other, other_optimizer)):
        step(*each, times=40)
    assert torch.equal(layer.weight, other.weight)
    mine, theirs = (o.state_dict()[MASTER] for o in (optimizer, other_optimizer))
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_master_copy_bytes_are_counted() -> None:
    layer, optimizer = make()
    assert master_bytes(layer, optimizer) == 4 * (12 + 3)
    assert master_bytes(*make(master=False)) == 0


def deep(num_layers):
    """Layers of bfloat16 with their gradients, and AdamW over copies of them."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(8, 8, dtype=torch.bfloat16) for _ in range(num_layers))
    optimizer = build_with_master([{"params": list(layers.parameters())}], adamw)
    give_gradients(layers)
    return layers, optimizer


def give_gradients(layers):
    for number, weight in enumerate(layers.parameters()):
        generator = torch.Generator().manual_seed(number)
        weight.grad = torch.randn(weight.shape, generator=generator).to(weight.dtype)


@pytest.mark.parametrize("at_once", [1, 300, 1000, master_copies.AT_ONCE_BYTES])
def test_chunk_size_does_not_change_master_steps(at_once, monkeypatch) -> None:
    """A layer has 256 and 32 bytes in float32."""
    expected, optimizer = deep(5)
    optimizer.step()
    monkeypatch.setattr(master_copies, "AT_ONCE_BYTES", at_once)
    layers, optimizer = deep(5)
    with Counted() as counted:
        optimizer.step()
    assert counted.names["_foreach_copy_"] == {1: 10, 300: 5, 1000: 2}.get(at_once, 1) + 1
    assert counted.names["copy_"] == counted.names["_to_copy"] == 0
    assert all(p.grad is None for p in layers.parameters())
    assert all(map(torch.equal, layers.parameters(), expected.parameters()))


def test_gradient_norm_is_one_unrounded_operation() -> None:
    layers, _ = deep(40)
    gradients = [p.grad for p in layers.parameters()]
    with Counted() as counted:
        norm = norm_in_float32(gradients)
    exact = torch.cat([g.double().flatten() for g in gradients]).norm()
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(exact.item(), rel=1e-6)
    assert sum(counted.names.values()) <= 4
