"""What may be changed to make a run faster or smaller without making it another training."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from eke.common import published_slowdowns as published
from eke.hardware import Device

CPU, CUDA = "cpu", "cuda"
BOTH = (CPU, CUDA)


class Numerics(Enum):
    """How far the arithmetic may move from what was typed."""

    same = "same"
    """The same formats; results differ by the order of sums alone."""
    mixed = "mixed"
    """Also 16-bit or TF32 products over float32 weights and optimizer states."""
    reduced = "reduced"
    """Also bfloat16 weights, float8 products and 8-bit optimizer states."""

    @property
    def includes(self) -> tuple["Numerics", ...]:
        """The classes that are allowed with this one."""
        every = tuple(Numerics)
        return every[: every.index(self) + 1]


@dataclass(frozen=True)
class Value:
    """One of the things an axis can be."""

    name: str
    overrides: tuple[str, ...]
    """Empty where it is what was typed."""
    usual: float = 1.0
    """Time of a step over that of what was typed, as published; no more than a first guess."""
    needless_beside: tuple[str, ...] = ()
    """Names of values of its axis that compute the same with fewer operations and more memory."""


@dataclass(frozen=True)
class Axis:
    """One technique, or set of techniques that exclude each other; what was typed is first."""

    name: str
    values: tuple[Value, ...]


@dataclass(frozen=True)
class _Technique:
    """Overrides that could be typed in place of what was."""

    axis: str
    overrides: str
    kinds: tuple[str, ...] = BOTH
    """Devices on which it can pay."""
    numerics: Numerics = Numerics.same
    usual: float = 1.0
    """Time of a step over that without it, on a GPU: published, and a first guess for no machine in
    particular. 1 where nothing is known."""
    usual_cpu: float | None = None
    """The same on a CPU; None is as on a GPU."""
    needless_beside: tuple[str, ...] = ()
    """Overrides that compute the same with fewer operations and more memory."""

    def usual_on(self, kind: str) -> float:
        """What is usual on a kind of device."""
        return self.usual_cpu if kind == CPU and self.usual_cpu else self.usual


CHECKPOINTING, SELECTIVE = published.CHECKPOINTING.slowdown, published.SELECTIVE.slowdown
COMPILED, EAGER = published.COMPILED.slowdown, published.EAGER.slowdown
HALF, TF32 = published.FP16.slowdown, published.TF32.slowdown
FP8 = published.FP8.slowdown * HALF
STATES_8_BIT = published.ADAM_8BIT.slowdown

PURE = "precision=bf16_pure"
KEEP_ALL, KEEP_HALF = "memory=none", "memory=checkpointing memory.every_n=2"

TECHNIQUES = (
    _Technique("attention", "attention=sdpa"),
    _Technique("attention", "attention=eager", (CPU,), usual=EAGER, usual_cpu=1.0),
    _Technique("attention", "attention=flash2", (CUDA,)),
    _Technique("attention", "attention=flash3", (CUDA,)),
    _Technique("compile", "compile=none"),
    _Technique("compile", "compile=inductor compile.regional=true", usual=COMPILED, usual_cpu=1.0),
    _Technique("compile", "compile=inductor", usual=COMPILED, usual_cpu=1.0),
    _Technique("compile", "compile=inductor compile.mode=reduce_overhead", (CUDA,), usual=COMPILED),
    _Technique("kernels", "kernels=none"),
    _Technique("kernels", "kernels=fused_linear_cross_entropy"),
    _Technique("kernels", "kernels=sparse_prediction"),
    _Technique("kernels", "kernels=liger", (CUDA,)),
    _Technique("memory", KEEP_ALL),
    _Technique(
        "memory", "memory=checkpointing_selective", usual=SELECTIVE, needless_beside=(KEEP_ALL,)
    ),
    _Technique("memory", KEEP_HALF, usual=(1 + CHECKPOINTING) / 2, needless_beside=(KEEP_ALL,)),
    _Technique(
        "memory", "memory=checkpointing", usual=CHECKPOINTING,
        needless_beside=(KEEP_ALL, KEEP_HALF),
    ),
    _Technique("precision", "precision=tf32", (CUDA,), Numerics.mixed, TF32),
    _Technique("precision", "precision=bf16", BOTH, Numerics.mixed, HALF, 1.0),
    _Technique("precision", "precision=fp16", (CUDA,), Numerics.mixed, HALF),
    _Technique("precision", f"{PURE} optimizer=adamw_bf16_sr", BOTH, Numerics.reduced, HALF, 1.0),
    _Technique("precision", f"{PURE} precision.master=on", BOTH, Numerics.reduced, HALF, 1.0),
    _Technique("precision", "precision=fp8", (CUDA,), Numerics.reduced, FP8),
    _Technique("optimizer", "optimizer=adamw_8bit", BOTH, Numerics.reduced, STATES_8_BIT),
)  # fmt: skip
"""Everything that is tried; rules and forecasts leave out what is impossible here."""

PER_DOUBLING = 1 / math.sqrt(published.QUARTER_BATCH.slowdown)
"""Time of a step over that of one with half the micro-batch: the guides' V100, 4 samples and 1."""


def axes_for(
    choices: Mapping[str, str],
    typed: Sequence[str],
    device: Device,
    numerics: Numerics,
    fixed: Iterable[str] = (),
) -> list[Axis]:
    """What can be varied: every group that nobody has typed.

    Args:
        choices: option of each group as typed.
        typed: overrides as typed; a group that is in them stays as it is.
        device: what it runs on.
        numerics: how far the arithmetic may move.
        fixed: groups that stay as they are, beside those that were typed.
    """
    kept = {*map(group_of, typed), *fixed}
    names = dict.fromkeys(technique.axis for technique in TECHNIQUES)
    axes = [_axis(name, choices, device, numerics, kept) for name in names if name not in kept]
    return [axis for axis in [*axes, *_sharing(device, kept)] if len(axis.values) > 1]


def group_of(override: str) -> str:
    """The group of an override: `compile` of `compile=inductor` and of `compile.regional=true`."""
    return override.lstrip("+").partition("=")[0].partition(".")[0]


def _axis(
    name: str, choices: Mapping[str, str], device: Device, numerics: Numerics, kept: set[str]
) -> Axis:
    mine = [each for each in TECHNIQUES if each.axis == name]
    typed = f"{name}={choices[name]}"
    known = next((each for each in mine if each.overrides == typed), _Technique(name, typed))
    before = known.usual_on(device.kind)
    others = [
        Value(
            each.overrides,
            tuple(each.overrides.split()),
            each.usual_on(device.kind) / before,
            each.needless_beside,
        )
        for each in mine
        if device.kind in each.kinds
        and each.numerics in numerics.includes
        and each.overrides != typed
        and not kept.intersection(map(group_of, each.overrides.split()))
    ]
    return Axis(name, (Value(typed, (), needless_beside=known.needless_beside), *others))


def _sharing(device: Device, kept: set[str]) -> list[Axis]:
    """Several GPUs of this machine, in powers of two."""
    if device.kind != CUDA or device.count < 2 or "distributed" in kept:
        return []
    counts = [2**n for n in range(1, device.count.bit_length()) if 2**n <= device.count]
    several = [f"distributed=ddp distributed.num_processes={count}" for count in counts]
    values = [
        Value(text, tuple(text.split()), 1 / count)
        for text, count in zip(several, counts, strict=True)
    ]
    return [Axis("distributed", (Value("distributed=none", ()), *values))]
