"""Activation checkpointing, and how to see that it happened.

Chen et al. 2016, arXiv:1604.06174: keep each layer's input, run its forward pass again in backward.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from eke.errors import RunError
from eke.plan import Plan
from eke.schema import Checkpointing


def apply_checkpointing(plan: Plan, model: torch.nn.Module) -> None:
    """Turn on what `memory.checkpointing` asks for; before compilation.

    Raises:
        RunError: if checkpointing was asked for and no layer of the model can do it.
    """
    CHECKPOINTING[plan.config.memory.checkpointing](model)


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
    def recomputed(self) -> bool:
        """Whether every layer ran twice; meaningful for exactly one forward and backward."""
        return bool(self.counts) and min(self.counts) >= 2


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


def _none(model: torch.nn.Module) -> None:
    """Keep every activation."""


def _full(model: torch.nn.Module) -> None:
    """Recompute every layer, by PyTorch's non-reentrant checkpoint."""
    layers = find_layers(model)
    if not layers:
        raise RunError(
            f"memory.checkpointing = full: {type(model).__name__} has no layer that "
            "transformers can checkpoint\n  -> memory=none"
        )
    # transformers renamed it and warns about the old name; earlier 5.x have only that one.
    renamed = hasattr(model, "activation_checkpointing_enable")
    name = f"{'activation' if renamed else 'gradient'}_checkpointing_enable"
    enable: Callable[..., None] = getattr(model, name)
    # Reentrant checkpointing needs inputs that require gradients, and cannot be compiled.
    enable({"use_reentrant": False})
    off = [type(layer).__name__ for layer in layers if not layer.gradient_checkpointing]
    if off:
        raise RunError(
            f"memory.checkpointing = full: {len(off)} of {len(layers)} layers stayed off "
            f"({off[0]})\n  -> memory=none"
        )


CHECKPOINTING: dict[Checkpointing, Callable[[torch.nn.Module], None]] = {
    Checkpointing.off: _none,
    Checkpointing.full: _full,
}
"""`memory.checkpointing` -> what it does to the model; options are presets of it."""
