"""What a forecast says of a plan's memory: values only, bytes of one device; no torch."""

from dataclasses import dataclass, field
from enum import Enum

PHASES = ("load", "forward", "backward", "optimizer", "evaluation")
"""Parts of a step in which memory can be at its highest, in their order; `load` is before them."""


class Method(Enum):
    """How a forecast was made, the exact one first."""

    trace = "trace"
    """The run's own builders, two steps on tensors without data, replayed through an allocator."""
    upper_bound = "upper_bound"
    """A trace of something that needs no less: the eager model in place of the compiled one."""
    closed_form = "closed_form"
    """Formulas over shapes: exact for what stays between steps, wide for activations."""


class Verdict(Enum):
    """Whether a plan has room on its device."""

    fits = "fits"
    tight = "tight"
    """The expected peak has room, the high one has not."""
    does_not_fit = "does not fit"
    """Even the expected peak has no room."""
    unknown = "unknown"
    """The device's memory is not known."""


@dataclass(frozen=True)
class Range:
    """Bytes: what is likely, and what it lies between."""

    low: int
    expected: int
    high: int

    def __post_init__(self) -> None:
        assert 0 <= self.low <= self.expected <= self.high, self


@dataclass(frozen=True)
class Traced:
    """What a trace found: peaks in bytes, of the first process's device."""

    allocated: dict[str, int]
    """Highest sum of tensors in each phase."""
    reserved: dict[str, int]
    """Highest sum of the allocator's segments up to the end of each phase; on a CPU, where there
    are none, the same as allocated."""
    components: dict[str, int]
    """What was alive at the highest sum of tensors: weights, gradients, optimizer, ..."""
    method: Method = Method.trace
    notes: tuple[str, ...] = ()
    """What the trace could not see, each in one clause."""
    beside: dict[str, int] = field(default_factory=dict)
    """Highest sum in each phase of what is neither a weight nor a gradient nor the optimizer's:
    what a process holds itself where all of these are shared out."""


@dataclass(frozen=True)
class Calibrated:
    """What finished runs on this device, with these libraries, add to a forecast."""

    peak: Range | None
    """As `Forecast.peak`, corrected; None where there are too few runs."""
    allocated: Range | None
    """As `Forecast.allocated`, corrected."""
    num_runs: int
    """Different configurations that were run."""
    needed: int
    """Of them, before anything is corrected."""
    factor: float
    """What the expected value was multiplied by; 1 where runs show no bias."""
    within: float
    """Relative error of the corrected expected value that 95 % of runs stay below."""
    versions: str
    """Of the libraries they ran with, in words."""


@dataclass(frozen=True)
class Forecast:
    """Predicted memory of one plan on one device."""

    method: Method
    basis: str
    """What `peak` is comparable with: `reserved by PyTorch on the GPU, and the context`."""
    peak: Range
    """What the device must have room for."""
    allocated: Range
    """Highest sum of tensors: comparable with a record's `peak_allocated_bytes`."""
    phases: dict[str, int]
    """Expected highest sum of tensors in each phase."""
    components: dict[str, int]
    """Expected bytes of each component at the peak; they add up to `peak.expected`."""
    capacity: int | None
    """Bytes of the device that this run can have; None where that is unknown."""
    verdict: Verdict
    notes: tuple[str, ...] = field(default=())
    """Why the range is as wide as it is, each in one clause."""
    not_traced: str = ""
    """Why there is no trace, where one was asked for."""
    calibrated: Calibrated | None = None
    """None where nobody has looked for runs."""

    @property
    def best(self) -> Range:
        """What the device must have room for, as far as finished runs have corrected it."""
        found = self.calibrated
        return self.peak if found is None or found.peak is None else found.peak

    @property
    def doubts(self) -> tuple[str, ...]:
        """All that makes the range as wide as it is."""
        missing = f"not traced: {self.not_traced}"
        return (*self.notes, missing) if self.not_traced else self.notes
