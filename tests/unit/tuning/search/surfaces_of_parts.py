"""Made-up machines of another make: a step is a sum of parts, and techniques act on parts.

Products, element-wise operations, attention and logits run on the device, launches on the host, the
update once a step. A technique quickens or slows some of these, so that what it is worth depends on
the model, on the micro-batch and on the other techniques. Estimates have the right structure and
wrong constants, as a time model that was calibrated on another machine has. Nothing here is eke's.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from unit.tuning.search.surfaces import AXES, Surface, point_of, typed_of

ON_DEVICE = ("products", "elementwise", "attention", "logits")

Range = tuple[float, float]

EFFECTS: Mapping[str, Mapping[str, Range]] = {
    "attention=flash2": {"attention": (0.2, 0.9)},
    "compile=inductor": {"elementwise": (0.3, 0.9), "launches": (0.3, 0.9)},
    "compile=regional": {"elementwise": (0.35, 0.95), "launches": (0.4, 1.0)},
    "compile=reduce_overhead": {"elementwise": (0.3, 0.95), "launches": (0.03, 0.3)},
    "kernels=fused": {"logits": (0.4, 1.3)},
    "kernels=liger": {"logits": (0.4, 1.3), "elementwise": (0.6, 1.05)},
    "memory=checkpointing": dict.fromkeys((*ON_DEVICE, "launches"), (1.2, 1.4)),
    "memory=checkpointing_selective": {"elementwise": (1.05, 1.4), "launches": (1.1, 1.6)},
    "precision=bf16": {"products": (0.12, 0.9), "elementwise": (0.6, 1.1),
                       "attention": (0.3, 0.9), "launches": (1.0, 1.5)},
}  # fmt: skip
"""Technique -> part -> what it multiplies the part's time by, drawn for each machine."""


@dataclass(frozen=True)
class Machine:
    """Constants of a machine and a model on it."""

    parts: Mapping[str, float]
    """Seconds: per sample on the device, per pass for `launches`, per step for `update`."""
    effects: Mapping[tuple[str, str], float]
    """(technique, part) -> factor."""
    half_rate: float
    """Micro-batch at which the device has half of its rate."""
    overlap: float
    """How well host and device work at the same time: the order of the norm that joins them."""

    def step_s(self, values: tuple[str, ...], size: int, target: int) -> float:
        """Seconds per step of `target` samples in micro-batches of `size`."""
        part = {
            name: seconds * math.prod(self.effects.get((value, name), 1.0) for value in values)
            for name, seconds in self.parts.items()
        }
        device = sum(part[name] for name in ON_DEVICE) * (size + self.half_rate)
        both = (device**self.overlap + part["launches"] ** self.overlap) ** (1 / self.overlap)
        return target / size * both + part["update"]

    def misjudged(self, rng: np.random.Generator, error: float) -> "Machine":
        """The same with constants that are off: parts by 25 %, effects by 10 % at `error` 1."""

        def off(by: float) -> float:
            return math.exp(rng.normal(0, by * error))

        return Machine(
            {name: seconds * off(0.25) for name, seconds in self.parts.items()},
            {key: factor * off(0.1) for key, factor in self.effects.items()},
            self.half_rate * off(0.5),
            self.overlap,
        )


def draw(rng: np.random.Generator) -> Machine:
    """A random machine."""
    parts = {
        "products": rng.uniform(0.001, 0.02),
        "elementwise": rng.uniform(0.0005, 0.01),
        "attention": rng.uniform(0.0001, 0.008),
        "logits": rng.uniform(0.0001, 0.006),
        "launches": rng.uniform(0.001, 0.06),
        "update": rng.uniform(0.0005, 0.03),
    }
    effects = {
        (value, part): rng.uniform(*factors)
        for value, parts_of in EFFECTS.items()
        for part, factors in parts_of.items()
    }
    return Machine(parts, effects, rng.uniform(0.1, 6), rng.uniform(2, 8))


def make_of_parts(seed: int, estimated: bool, error: float = 1.0) -> Surface:
    """A random machine's surface.

    Args:
        seed: of everything about it.
        estimated: whether there is a time model.
        error: scale of its errors.
    """
    rng = np.random.default_rng([seed, 2])
    target = int(rng.choice([8, 16, 32, 64, 128]))
    machine = draw(rng)
    model, scale = machine.misjudged(rng, error), rng.normal(0, 0.3 * error)
    kept = {"memory=checkpointing": rng.uniform(0.15, 0.4),
            "memory=checkpointing_selective": rng.uniform(0.5, 0.8)}  # fmt: skip
    room = rng.uniform(2, 1.5 * target)
    points, step_s, runs_out = [], [], []
    for values in itertools.product(*AXES):
        odd = rng.normal(0, 0.02)
        share = math.prod([
            kept.get(values[3], 1.0),
            1.0 if values[2] == AXES[2][0] else 0.85,
            1.0 if values[4] == AXES[4][0] else 0.6,
        ])  # fmt: skip
        for size in (2**n for n in range(target.bit_length())):
            seconds = machine.step_s(values, size, target) * math.exp(odd + rng.normal(0, 0.01))
            expected_s = model.step_s(values, size, target) * math.exp(scale + rng.normal(0, 0.02))
            expected = size * share * math.exp(rng.normal(0, 0.02))
            known_s = expected_s if estimated else None
            points.append(point_of(values, size, expected, room, known_s))
            step_s.append(seconds)
            runs_out.append(size * share > room)
    return Surface(points, step_s, runs_out, typed_of(points))
