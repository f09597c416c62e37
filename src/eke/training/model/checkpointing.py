"""Activation checkpointing, and how to see that it happened.

Chen et al. 2016, arXiv:1604.06174: keep each layer's input, run its forward pass again in backward.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from eke.common.errors import RunError
from eke.config.schema import Checkpointing
from eke.plan.planner import Plan
from eke.training.model import checkpoint_contexts as contexts


def apply_checkpointing(plan: Plan, model: torch.nn.Module) -> None:
    """Turn on what `memory.checkpointing` asks for; before compilation.

    Raises:
        RunError: if checkpointing was asked for and no layer of the model can do it.
    """
    memory = plan.config.memory
    arguments = CHECKPOINTING[memory.checkpointing](plan)
    if arguments is not None:
        _enable(model, arguments, memory.checkpointing.value)
        for layer in set(find_layers(model)) - set(find_layers(model)[:: memory.every_n]):
            layer.gradient_checkpointing = False  # type: ignore[assignment]  # torch 2.13: a Module


def find_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The Transformer layers: what transformers recomputes as a unit; T5's encoder comes first."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]


@dataclass
class LayerCalls:
    """Forward calls of each layer."""

    counts: list[int] = field(default_factory=list)
    """In the order of `find_layers`."""

    @property
    def mean(self) -> float:
        """Forward calls per layer; 0 of a model without layers."""
        return sum(self.counts) / len(self.counts) if self.counts else 0.0

    def recomputed(self, num_micro_batches: int = 1) -> int:
        """Layers that ran more than once per micro-batch."""
        return sum(count > num_micro_batches for count in self.counts)


@contextmanager
def count_layer_calls(model: torch.nn.Module) -> Iterator[LayerCalls]:
    """Count the forward calls of every Transformer layer, recomputations included.

    One forward and backward pass gives 1 per layer, and 2 with checkpointing. Only eager code can
    be counted: torch.compile ignores hooks that come after it, so a compiled model gives 0.

    transformers checkpoints a layer's `forward` inside its `__call__`, where hooks of the layer do
    not see the second run, so its first leaf is hooked: in every family a norm or a query
    projection, called once per forward pass.
    """
    calls = LayerCalls()
    handles: list[RemovableHandle] = []
    for index, layer in enumerate(find_layers(model)):
        calls.counts.append(0)
        handles.append(_first_leaf(layer).register_forward_pre_hook(_counter(calls, index)))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _first_leaf(layer: torch.nn.Module) -> torch.nn.Module:
    """The first module of a layer that has no children."""
    return next(m for m in layer.modules() if not any(True for _ in m.children()))


def _counter(calls: LayerCalls, index: int) -> Callable[..., None]:
    def count(*_: Any) -> None:
        calls.counts[index] += 1

    return count


def _enable(model: torch.nn.Module, arguments: dict[str, Any], name: str) -> None:
    """Turn on transformers' checkpointing of every layer, with these arguments of torch's."""
    layers = find_layers(model)
    if not layers:
        raise RunError(
            f"memory.checkpointing = {name}: {type(model).__name__} has no layer that "
            "transformers can checkpoint\n  -> memory=none"
        )
    # transformers renamed it and warns about the old name; earlier 5.x have only that one.
    renamed = hasattr(model, "activation_checkpointing_enable")
    method = f"{'activation' if renamed else 'gradient'}_checkpointing_enable"
    enable: Callable[..., None] = getattr(model, method)
    # Reentrant checkpointing needs inputs that require gradients, and cannot be compiled.
    enable({"use_reentrant": False, **arguments})
    off = [type(layer).__name__ for layer in layers if not layer.gradient_checkpointing]
    if off:
        raise RunError(
            f"memory.checkpointing = {name}: {len(off)} of {len(layers)} layers stayed off "
            f"({off[0]})\n  -> memory=none"
        )


def _off(plan: Plan) -> None:
    """Keep every activation."""


def _full(plan: Plan) -> dict[str, Any]:
    """Keep the layer's input alone."""
    return {"context_fn": contexts.marked} if _gathers_inside(plan) else {}


def _selective(plan: Plan) -> dict[str, Any]:
    """Keep the layer's input and what was dear to compute."""
    inside = _gathers_inside(plan)
    return {"context_fn": contexts.selective_among_others if inside else contexts.selective}


def _gathers_inside(plan: Plan) -> bool:
    """Whether a layer's weights are gathered by operations of the layer's own forward pass."""
    return plan.config.distributed.option == "zero3"


CHECKPOINTING: dict[Checkpointing, Callable[[Plan], dict[str, Any] | None]] = {
    Checkpointing.off: _off,
    Checkpointing.full: _full,
    Checkpointing.selective: _selective,
}
"""`memory.checkpointing` -> arguments of torch's checkpoint; options are presets of it."""
