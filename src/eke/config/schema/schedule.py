"""Schemas of the learning rate over steps."""

from dataclasses import dataclass, field

from eke.config.schema.limits import at_least, between


@dataclass
class Schedule:
    """Learning rate over steps."""

    option: str = "cosine"
    """The option chosen; set by the option's file."""
    warmup_steps: int | None = field(default=None, metadata=at_least(0))
    """Linear warm-up in steps; null takes `warmup_frac` of the run."""
    warmup_frac: float = field(default=0.05, metadata=between(0, 1))
    """Linear warm-up as a share of the run."""


@dataclass
class DecayingSchedule(Schedule):
    """A schedule that ends below its peak."""

    final_frac: float = field(default=0.0, metadata=between(0, 1))
    """Learning rate at the end, as a share of the peak."""


@dataclass
class WSDSchedule(DecayingSchedule):
    """Warm-up, stable, decay (Hu et al. 2024, arXiv:2404.06395)."""

    decay_frac: float = field(default=0.2, metadata=between(0, 1))
    """Share of the run spent on the final linear decay."""


SCHEDULES: dict[str, type] = {
    "constant": Schedule,
    "decaying": DecayingSchedule,
    "wsd": WSDSchedule,
}
"""Schema name -> class."""
