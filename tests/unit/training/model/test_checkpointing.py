"""Checkpointing: what it must not change, and the sign that it happened."""

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from unit.models.sizes.configs import FAMILY_CASES
from unit.training.model.plans import hand_plan, options_of
from unit.training.model.steps import make_inputs, step

from eke.common.errors import RunError
from eke.config.schema import Checkpointing
from eke.training.model.build_model import build_model
from eke.training.model.checkpointing import (
    CHECKPOINTING,
    apply_checkpointing,
    count_layer_calls,
    find_layers,
)

CPU = torch.device("cpu")


def build(*overrides):
    plan = hand_plan(*overrides)
    model = build_model(plan, CPU)
    apply_checkpointing(plan, model)
    return model


def test_presets_cover_the_builders():
    presets = {hand_plan(f"memory={o}").config.memory.checkpointing for o in options_of("memory")}
    assert presets == set(CHECKPOINTING) == set(Checkpointing)


@pytest.mark.parametrize(
    ("overrides", "on"),
    [
        (("memory=none",), False),
        (("memory=checkpointing",), True),
        (("memory.checkpointing=full",), True),
        (("memory=checkpointing", "memory.checkpointing=off"), False),
    ],
    ids=str,
)
def test_field_value_is_used_instead_of_preset_name(overrides, on):
    assert {m.gradient_checkpointing for m in find_layers(build(*overrides))} == {on}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_every_layer_runs_twice(attention):
    """Of one family; those of the others are counted below."""
    for memory, calls in (("none", 1), ("checkpointing", 2)):
        model = build(f"attention={attention}", f"memory={memory}")
        with count_layer_calls(model) as counted:
            step(model)
        assert counted == [calls] * 4


@pytest.mark.parametrize(("option", "task"), FAMILY_CASES, ids=lambda value: value)
def test_loss_and_gradients_are_the_same_with_dropout(option, task):
    sizes = ("model.dropout=0.1", "model.num_hidden_layers=2")
    results = []
    for memory, calls in (("none", 1), ("checkpointing", 2), ("checkpointing_selective", 2)):
        model = build(f"model={option}", f"task={task}", f"memory={memory}", *sizes)
        torch.manual_seed(5)
        with count_layer_calls(model) as counted:
            results.append(step(model))
        assert set(counted) == {calls}
    (loss, gradients), *others = results
    for loss_again, gradients_again in others:
        assert torch.equal(loss, loss_again)
        torch.testing.assert_close(gradients, gradients_again, rtol=1e-6, atol=1e-8)


def test_no_recomputation_in_evaluation():
    model = build("memory=checkpointing").eval()
    with count_layer_calls(model) as counted, torch.no_grad():
        model(**make_inputs(model))
    assert counted == [1] * 4


def test_counting_leaves_no_hooks():
    model = build("memory=none")
    with count_layer_calls(model) as counted:
        pass
    step(model)
    assert counted == [0] * 4
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_model_without_layers_is_rejected():
    with pytest.raises(RunError, match=r"Linear.*\n  -> memory=none"):
        apply_checkpointing(hand_plan("memory=checkpointing"), torch.nn.Linear(2, 2))


def test_layer_that_cannot_be_checkpointed_is_rejected():
    model = build_model(hand_plan("model=tiny"), CPU)
    model.activation_checkpointing_enable = lambda arguments: None
    with pytest.raises(RunError, match=r"4 of 4 layers .*\(LlamaDecoderLayer\)"):
        apply_checkpointing(hand_plan("memory=checkpointing"), model)


@pytest.mark.parametrize("zero3", [False, True], ids=["one process", "zero3"])
def test_in_place_changes_are_recomputed_correctly(zero3):
    """As GPT-OSS's experts do; a result that nothing changes is kept without a copy."""
    contexts = CHECKPOINTING[Checkpointing.selective][zero3]
    weights = [torch.randn(8, 8, requires_grad=True) for _ in range(2)]

    def layer(x):
        y = x @ weights[0]
        y += 1.0
        y[:, :4].mul_(2.0)
        return torch.sigmoid(y) @ weights[1]

    x, found = torch.randn(4, 8, requires_grad=True), []
    for context in (None, contexts):
        more = {"context_fn": context} if context else {}
        run = functools.partial(checkpoint, layer, use_reentrant=False, **more)
        found.append(torch.autograd.grad((run if context else layer)(x).sum(), [x, *weights]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
