"""Activations that leave the device; the host stands in for a GPU where there is none."""

import contextlib

import pytest
import torch
from torch import nn
from unit.build.plans import hand_plan
from unit.build.sharded import among, sharded_model, sharded_plan
from unit.build.steps import make_inputs

import eke.build.activation_offload as activation_offload
from eke.build.activation_offload import MIN_BYTES, ActivationOffload, build_activation_offload
from eke.build.checkpointing import apply_checkpointing
from eke.build.model import build_model

CPU = torch.device("cpu")


@pytest.fixture
def everything_is_away(monkeypatch):
    """Tensors of the host count as a GPU's: they are copied there and back."""
    monkeypatch.setattr(activation_offload, "is_away", lambda tensor: True)


def gradients(model, inputs, context):
    model.zero_grad()
    with context:
        loss = model(**inputs).logits.square().mean()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_the_option_says_whether():
    model = nn.Linear(2, 2)
    assert isinstance(
        build_activation_offload(hand_plan("memory=activation_offload"), model), ActivationOffload
    )
    off = build_activation_offload(hand_plan("memory=none"), model)
    assert isinstance(off, contextlib.nullcontext)


def test_gradients_are_those_of_the_tensors_that_stayed(everything_is_away):
    model = build_model(hand_plan("model=tiny"), CPU)
    inputs = make_inputs(model)
    kept = gradients(model, inputs, contextlib.nullcontext())
    offload = ActivationOffload(model)
    for _ in range(2):
        moved = gradients(model, inputs, offload)
        assert all(torch.equal(kept[name], moved[name]) for name in kept)
    assert offload.bytes_moved > 0


def test_weights_and_small_tensors_stay(everything_is_away):
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


def test_what_is_moved_is_not_kept(everything_is_away):
    offload = ActivationOffload(nn.Identity())
    with offload:
        x = torch.randn(64, 64, requires_grad=True)
        y = x.exp()
    before = y.clone()
    y.detach().zero_()  # what the forward pass saved is elsewhere
    y.sum().backward()
    assert torch.equal(x.grad, before.detach())


def test_with_checkpointing_only_the_inputs_of_layers_are_moved(everything_is_away):
    moved = {}
    for option in ("memory=none", "memory=checkpointing"):
        plan = hand_plan("model=tiny", option)
        model = build_model(plan, CPU)
        apply_checkpointing(plan, model)
        offload = ActivationOffload(model)
        gradients(model, make_inputs(model, length=64), offload)
        moved[option] = offload.bytes_moved
    assert 0 < moved["memory=checkpointing"] < moved["memory=none"] / 2


def test_on_the_host_nothing_moves():
    model = build_model(hand_plan("model=tiny"), CPU)
    offload = ActivationOffload(model)
    gradients(model, make_inputs(model), offload)
    assert offload.bytes_moved == 0


def test_gathered_weights_are_moved_as_if_they_were_activations(everything_is_away):
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
