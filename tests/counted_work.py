"""What one training step does, operator by operator: the run's builders on tensors without data.

The truth for `eke.estimate.time`: launches and bytes are counted where a GPU would have them, since
the fake device of `eke.training.trace` chooses the kernels that a GPU has.
"""

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from eke.plan.planner import Plan
from eke.training.trace import trace_plan
from eke.training.trace.fake_device import _kind
from eke.training.trace.trace import StorageTrace

PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "_grouped_mm")
FREE = ("detach", "_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "alias")
WRITTEN_ONLY = ("zero_", "fill_", "zeros", "zeros_like", "ones_like", "full", "full_like")


@dataclass
class Count:
    """Of one phase."""

    launches: int = 0
    moved: int = 0
    """Bytes read and written by what is no matrix multiplication and no fused attention."""
    products: int = 0
    """Launches of matrix multiplications and of fused attention."""
    names: dict[str, list[int]] = field(default_factory=dict)

    def __sub__(self, other: "Count") -> "Count":
        names = {
            name: [n - m for n, m in zip(found, other.names.get(name, [0, 0]), strict=True)]
            for name, found in self.names.items()
        }
        return Count(
            self.launches - other.launches,
            self.moved - other.moved,
            self.products - other.products,
            names,
        )


class Counting(StorageTrace):
    """Counts what a trace sees."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.counts: list[tuple[str, Count]] = []

    def begin(self, phase: str, counted: bool = True) -> None:
        self.counts.append((phase, Count()))
        super().begin(phase, counted)

    def _note(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        super()._note(func, args, out)
        if not self.counts:
            return
        name = func._schema.name.rpartition("::")[2]
        if name in FREE or _kind(func) == "view":
            return
        count = self.counts[-1][1]
        if name in PRODUCTS or "attention" in name:
            count.launches += 1
            count.products += 1
            return
        written = _bytes([out], self.kind)
        read = 0 if name in WRITTEN_ONLY else _bytes(args, self.kind)
        if name == "embedding":  # looks up as many rows as it writes
            read = written + _bytes(args[1:], self.kind)
        if not written:  # returns nothing and writes into its arguments
            declared = zip(func._schema.arguments, args, strict=False)
            # Fused optimizers may unscale gradients in place, and do so with a scaler alone.
            changed = [
                arg
                for one, arg in declared
                if one.alias_info and one.alias_info.is_write and one.name != "grads"
            ]
            written = _bytes(changed, self.kind)
        if not read + written:
            return
        if name == "sigmoid" and self.counts[-1][0] == "backward":
            # The fake device writes SiLU's derivative out, seven operators that touch a tensor 17
            # times in all; CUDA has one kernel for it, which reads two tensors and writes one.
            count.launches -= 6
            written -= 14 * _bytes([out], self.kind)
        count.launches += 1
        count.moved += read + written
        each = count.names.setdefault(name, [0, 0])
        each[0] += 1
        each[1] += read + written


def _bytes(values: Iterable[Any], kind: str) -> int:
    found = 0
    for value in values:
        if type(value) is FakeTensor or isinstance(value, torch.Tensor):
            if getattr(value, "fake_device", value.device).type == kind:
                found += _touched(value) * value.itemsize
        elif isinstance(value, list | tuple):
            found += _bytes(value, kind)
    return found


def _touched(tensor: torch.Tensor) -> int:
    """Different numbers: those of an expanded tensor are read once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count


def counted(plan: Plan) -> dict[str, Count]:
    """Of the second step, whose optimizer has its state: phase -> what it does."""
    traces: list[Counting] = []

    def make(*args: Any) -> Counting:
        traces.append(Counting(*args))
        return traces[0]

    with _replaced(trace_plan, "StorageTrace", make):
        trace_plan.trace_history(plan)
    phases = traces[0].counts
    steps = [n for n, (phase, _) in enumerate(phases) if phase == "optimizer"]
    found: dict[str, Count] = {}
    for phase, count in phases[steps[0] + 1 : steps[1] + 1]:
        found[phase] = count  # of several micro-batches the last one
    return found


@contextlib.contextmanager
def _replaced(module: Any, name: str, value: Any) -> Any:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
