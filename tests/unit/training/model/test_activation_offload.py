"""Activations that leave the device; the host stands in for a GPU where there is none."""

import contextlib
import weakref

import pytest
import torch
from torch import nn
from unit.training.model.plans import hand_plan
from unit.training.model.sharded import among, sharded_model, sharded_plan
from unit.training.model.steps import make_inputs

from eke.training.model import activation_offload
from eke.training.model.activation_offload import (
    IN_FLIGHT,
    MIN_BYTES,
    ActivationOffload,
    build_activation_offload,
)
from eke.training.model.build_model import build_model
from eke.training.model.checkpointing import apply_checkpointing

CPU = torch.device("cpu")


@pytest.fixture
def everything_is_away(monkeypatch):
    """Tensors of the host count as a GPU's: they are copied there and back."""
    monkeypatch.setattr(activation_offload, "is_on_device", lambda tensor: True)


def gradients(model, inputs, context):
    model.zero_grad()
    torch.manual_seed(0)  # T5 has dropout
    with context:
        loss = model(**inputs).logits.square().mean()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_offload_is_built_only_on_request():
    model = nn.Linear(2, 2)
    assert isinstance(
        build_activation_offload(hand_plan("memory=activation_offload"), model), ActivationOffload
    )
    off = build_activation_offload(hand_plan("memory=none"), model)
    assert isinstance(off, contextlib.nullcontext)


def test_weights_and_small_tensors_are_not_offloaded(everything_is_away):
    model = nn.Linear(64, 64, bias=False)
    x = torch.randn(64, 64, requires_grad=True)  # saved for the weight's gradient
    small = torch.randn(2, requires_grad=True)
    offload = ActivationOffload(model)
    with offload:
        y = model(x)  # saves x, and the weight for the gradient of x
        small.square()
    assert small.nbytes < MIN_BYTES
    assert offload.bytes_moved == x.nbytes
    y.sum().backward()
    torch.testing.assert_close(x.grad, model.weight.detach().sum(0).expand(64, 64))


def moved_under_autocast(family, dtype=torch.bfloat16):
    """Gradients with and without, and the bytes that were moved."""
    task = {"tiny_bert": "masked_lm", "tiny_t5": "seq2seq_lm"}.get(family, "causal_lm")
    plan = hand_plan(f"model={family}", f"task={task}", "model.num_hidden_layers=2")
    model = build_model(plan, CPU)
    inputs = make_inputs(model, length=32)
    autocast = torch.autocast("cpu", dtype=dtype)
    kept = gradients(model, inputs, autocast)
    offload = ActivationOffload(model)
    both = contextlib.ExitStack()
    both.enter_context(autocast)
    both.enter_context(offload)
    return model, kept, gradients(model, inputs, both), offload.bytes_moved


FAMILIES = ("tiny", "tiny_bert", "tiny_t5", "tiny_gpt2", "tiny_moe", "tiny_qwen3")


@pytest.mark.parametrize("family", FAMILIES)
def test_autocast_weight_copies_are_not_offloaded(family, everything_is_away, monkeypatch):
    _, kept, moved, num_bytes = moved_under_autocast(family)
    assert all(torch.equal(kept[name], moved[name]) for name in kept)
    monkeypatch.setattr(activation_offload, "copied_leaf", lambda tensor: None)
    model, *_, with_copies = moved_under_autocast(family)
    matrices = sum(2 * p.numel() for p in model.parameters() if p.ndim > 1)
    tables = sum(2 * m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding))
    assert matrices - tables <= with_copies - num_bytes <= matrices


def test_weight_copy_is_rebuilt_from_the_saved_version(everything_is_away):
    model = nn.Linear(64, 64, bias=False)
    x = torch.randn(8, 64, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16), ActivationOffload(model):
        y = model(x)
    with torch.no_grad():
        model.weight.zero_()
    with pytest.raises(RuntimeError, match="changed between the forward and the backward pass"):
        y.sum().backward()


@pytest.mark.parametrize(
    "view",
    [
        lambda w: w.to(torch.bfloat16),
        lambda w: w.t().to(torch.bfloat16),
        lambda w: w.to(torch.bfloat16).view(8, 2, 32),
        lambda w: w.to(torch.bfloat16).permute(1, 0).unsqueeze(0),
    ],
    ids=["copy", "copy of a transpose", "view", "transpose of a copy"],
)
def test_any_view_of_a_weight_copy_is_rebuilt(view):
    weight = nn.Parameter(torch.randn(16, 32))
    seen = view(weight)
    leaf = activation_offload.copied_leaf(seen)
    assert leaf is weight
    again = activation_offload.rebuild_view(seen, leaf)()
    assert torch.equal(again, seen)
    assert again.stride() == seen.stride()


@pytest.mark.parametrize(
    "other",
    [
        lambda w: w.to(torch.bfloat16)[2:],
        lambda w: w[2:].to(torch.bfloat16),
        lambda w: w.expand(2, 16, 32).to(torch.bfloat16),
        lambda w: (2 * w).to(torch.bfloat16),
        lambda w: w.to(torch.bfloat16).to(torch.float16),
        lambda w: w.view(32, 16),
        lambda w: w.detach(),
    ],
    ids=["part", "copy of a part", "repeated", "product", "copied twice", "no copy", "no graph"],
)
def test_other_tensors_are_activations(other):
    assert activation_offload.copied_leaf(other(nn.Parameter(torch.randn(16, 32)))) is None


def test_offloaded_activations_are_not_kept(everything_is_away):
    offload = ActivationOffload(nn.Identity())
    with offload:
        x = torch.randn(64, 64, requires_grad=True)
        y = x.exp()
        z = y
        for _ in range(IN_FLIGHT + 1):
            z = z.cos()
    before = y.clone()
    y.detach().zero_()  # what the forward pass saved is elsewhere
    z.sum().backward()
    expected = torch.autograd.grad(repeated_cos(again := before.detach().requires_grad_()), again)
    assert torch.equal(x.grad, expected[0] * before)


def repeated_cos(z):
    for _ in range(IN_FLIGHT + 1):
        z = z.cos()
    return z.sum()


def test_in_place_change_during_offload_is_an_error(everything_is_away):
    with ActivationOffload(nn.Identity()):
        x = torch.randn(64, 64, requires_grad=True)
        y = x.exp()
    y.detach().zero_()
    with pytest.raises(RuntimeError, match="changed in place"):
        y.sum().backward()


def test_shared_activation_is_moved_once(everything_is_away):
    x = torch.randn(64, 64, requires_grad=True)
    projections = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
    offload = ActivationOffload(projections)
    with offload:
        y = sum(each(x) for each in projections)
    assert offload.bytes_moved == x.nbytes
    y.sum().backward()
    expected = sum(each.weight.detach().sum(0) for each in projections).expand(64, 64)
    torch.testing.assert_close(x.grad, expected)


class LateStream:
    """Copies only once they are waited for, and holds no tensor that it does not protect."""

    def __init__(self):
        self.queued, self.done, self.protected = [], 0, []

    def copy(self, target, source):
        if not any(target is each for each in self.protected):
            target.fill_(torch.nan if target.is_floating_point() else 0)
        self.queued.append((weakref.ref(target), weakref.ref(source)))
        return len(self.queued)

    def wait(self, event):
        for target, source in self.queued[self.done : event]:
            assert target() is not None, "memory was freed while a copy into it was queued"
            assert source() is not None, "memory was freed before it was copied"
            target().copy_(source())
        self.done = max(self.done, event)

    def protect(self, tensor):
        self.protected.append(tensor)


@pytest.mark.parametrize("family", ["tiny", "tiny_t5"])
def test_offloaded_tensor_is_used_only_after_its_copy(family, everything_is_away):
    task = {"tiny_t5": "seq2seq_lm"}.get(family, "causal_lm")
    model = build_model(hand_plan(f"model={family}", f"task={task}"), CPU)
    inputs = make_inputs(model, length=32)
    kept = gradients(model, inputs, contextlib.nullcontext())
    offload = ActivationOffload(model)
    late = LateStream()
    offload.copy, offload.wait, offload.protect = late.copy, late.wait, late.protect
    for _ in range(3):
        moved = gradients(model, inputs, offload)
        assert all(torch.equal(kept[name], moved[name]) for name in kept)
    assert len(late.protected) <= 3 * 2 * IN_FLIGHT, "nearly all memory is the allocator's own"


def test_checkpointing_offloads_only_layer_inputs(everything_is_away):
    moved = {}
    for option in ("memory=none", "memory=checkpointing"):
        plan = hand_plan("model=tiny", option)
        model = build_model(plan, CPU)
        apply_checkpointing(plan, model)
        offload = ActivationOffload(model)
        gradients(model, make_inputs(model, length=64), offload)
        moved[option] = offload.bytes_moved
    assert 0 < moved["memory=checkpointing"] < moved["memory=none"] / 2


def test_gathered_weights_are_offloaded_like_activations(everything_is_away):
    """Why there is a rule: FSDP2 puts a layer's weights together in memory of their own."""

    def moved(model, weights):
        offload = ActivationOffload(weights)
        with offload:
            model(**make_inputs(model))
        return offload.bytes_moved

    whole = build_model(hand_plan("model=tiny"), CPU)
    matrices = sum(p.nbytes for layer in whole.model.layers for p in layer.parameters())
    with among(2, 1):
        cut = sharded_model(sharded_plan(2, "model=tiny"))
        parts = nn.ParameterList(p.detach().to_local() for p in cut.parameters())
        together = moved(cut, parts)
    assert together - moved(whole, whole) > matrices / 2
