"""What each kind of checkpointing computes twice, counted, and what it keeps, in bytes."""

import pytest
import torch
from unit.models.sizes.configs import FAMILY_CASES
from unit.training.model.plans import hand_plan
from unit.training.model.steps import make_inputs, step

from eke.training.model import checkpointing
from eke.training.model.attention_kernels import KernelProbe
from eke.training.model.build_model import build_model
from eke.training.model.checkpointing import (
    apply_checkpointing,
    count_layer_calls,
    find_layers,
    marked,
    selective,
    selective_with_user_ops,
)

CPU = torch.device("cpu")
NUM_LAYERS = 4

FULL, SELECTIVE = "memory=checkpointing", "memory=checkpointing_selective"


def build(*overrides):
    plan = hand_plan(*overrides)
    model = build_model(plan, CPU)
    apply_checkpointing(plan, model)
    return model


def probed(model):
    with KernelProbe() as probe, count_layer_calls(model) as calls:
        step(model)
    return probe, calls


def num_dear(probe):
    return sum(probe.repeated[name] for name in checkpointing.KEPT)


def kept_bytes(model):
    """Bytes that a forward pass leaves allocated: what its backward pass needs, and the logits."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiled:
        output = model(**make_inputs(model, length=64)).logits
    assert output.requires_grad  # and alive: what it needs for the backward pass is there
    events = profiled.profiler.kineto_results.events()
    return sum(event.nbytes() for event in events if event.name() == "[memory]")


@pytest.mark.parametrize(("option", "task"), FAMILY_CASES, ids=lambda value: value)
def test_selective_repeats_no_matrix_multiplication(option, task):
    whole, _ = probed(build(f"model={option}", f"task={task}", FULL))
    seen, calls = probed(build(f"model={option}", f"task={task}", SELECTIVE))
    assert calls == [2] * NUM_LAYERS
    assert 0 < seen.repeated.total() < whole.repeated.total()
    assert num_dear(seen) == 0 < num_dear(whole)


def test_model_without_checkpointing_does_not_recompute():
    seen, calls = probed(build("memory=none"))
    assert (seen.repeated.total(), calls) == (0, [1] * NUM_LAYERS)


@pytest.mark.parametrize(
    ("every_n", "counts"), [(1, [2] * 4), (2, [2, 1, 2, 1]), (9, [2, 1, 1, 1])]
)
@pytest.mark.parametrize("option", [FULL, SELECTIVE], ids=["full", "selective"])
def test_every_nth_layer_is_recomputed(option, every_n, counts):
    model = build(option, f"memory.every_n={every_n}")
    assert [layer.gradient_checkpointing for layer in find_layers(model)] == [c > 1 for c in counts]
    _, calls = probed(model)
    assert calls == counts


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_more_recomputation_keeps_less_memory(attention):
    """none > every other layer > all layers, and selective between none and all."""
    ways = {
        "none": ("memory=none",),
        "half": (FULL, "memory.every_n=2"),
        "selective": (SELECTIVE,),
        "full": (FULL,),
    }
    kept = {name: kept_bytes(build(f"attention={attention}", *way)) for name, way in ways.items()}
    assert kept["full"] < kept["half"] < kept["none"]
    assert kept["full"] < kept["selective"] < kept["none"]
    # Half of the layers recomputed is half of the way, but for the layers' inputs.
    middle = (kept["full"] + kept["none"]) / 2
    assert kept["half"] == pytest.approx(middle, rel=0.05)


def test_policy_that_keeps_no_results_is_detected(monkeypatch):
    from torch.utils.checkpoint import CheckpointPolicy

    monkeypatch.setattr(
        checkpointing, "_keep_expensive", lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE
    )
    seen, _ = probed(build(SELECTIVE))
    assert num_dear(seen) > 0


class Gathered(torch.autograd.Function):
    """A linear layer as ZeRO-3 computes it: in an autograd function, where gradients are off."""

    @staticmethod
    def forward(ctx, inputs, weight):
        ctx.save_for_backward(inputs, weight)
        return inputs @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        inputs, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ inputs


def gathered_layer(fetches):
    """A layer which first does as many operations as `fetches` gives for this call."""
    weight = torch.eye(4, requires_grad=True)

    def layer(inputs):
        for _ in range(next(fetches)):
            torch.empty(3).zero_()
        return Gathered.apply(inputs, weight).relu()

    return layer


def backward_of(context_fn, fetches=(0, 0)):
    layer = gathered_layer(iter(fetches))
    inputs = torch.ones(2, 4, requires_grad=True)
    with KernelProbe() as probe:
        output = torch.utils.checkpoint.checkpoint(
            layer, inputs, use_reentrant=False, context_fn=context_fn
        )
        output.sum().backward()
    assert torch.equal(inputs.grad, torch.ones(2, 4))
    return num_dear(probe)


def test_recomputation_in_a_marked_autograd_function_is_detected():
    assert backward_of(torch.utils.checkpoint.noop_context_fn) == 0  # unseen
    assert backward_of(marked) == 1
    assert backward_of(selective_with_user_ops) == 0


@pytest.mark.parametrize("fetches", [(0, 2), (2, 0), (3, 1)])
def test_fetched_weights_inside_a_layer_may_differ(fetches):
    assert backward_of(selective_with_user_ops, fetches) == 0
    if fetches[1] > fetches[0]:
        with pytest.raises(RuntimeError, match="not found in storage"):
            backward_of(selective, fetches)
