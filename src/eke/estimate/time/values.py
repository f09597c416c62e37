"""Values of the time model: estimates in seconds; no torch."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Span:
    """A quantity as low, expected and high; the unit is its owner's."""

    low: float
    expected: float
    high: float

    def __post_init__(self) -> None:
        assert 0 <= self.low <= self.expected <= self.high, self

    def __add__(self, other: "Span") -> "Span":
        return Span(self.low + other.low, self.expected + other.expected, self.high + other.high)

    def __mul__(self, factor: float) -> "Span":
        return Span(self.low * factor, self.expected * factor, self.high * factor)

    def by(self, other: "Span") -> "Span":
        """The product, low with low and high with high."""
        return Span(self.low * other.low, self.expected * other.expected, self.high * other.high)

    def over(self, rate: "Span") -> "Span":
        """Time of an amount at a rate: the least of it at the highest rate is the low end."""
        return Span(self.low / rate.high, self.expected / rate.expected, self.high / rate.low)

    def inverse(self, amount: float) -> "Span":
        """How many of `amount` a second: the shortest time has the highest rate."""
        low, expected, high = self.high, self.expected, max(self.low, 1e-12)
        return Span(amount / low, amount / expected, amount / high)


NOTHING = Span(0.0, 0.0, 0.0)


def exactly(amount: float) -> Span:
    """What is known."""
    return Span(amount, amount, amount)


def total(spans: "list[Span] | tuple[Span, ...]") -> Span:
    """The sum: of low ends, of expected values and of high ends."""
    found = NOTHING
    for each in spans:
        found = found + each
    return found


def highest(one: Span, other: Span) -> Span:
    """The larger of two, end by end."""
    return Span(
        max(one.low, other.low), max(one.expected, other.expected), max(one.high, other.high)
    )


@dataclass(frozen=True)
class PaceCalibration:
    """What finished runs on this device, with these libraries, say of the time model."""

    num_runs: int
    """Different configurations that were run."""
    needed: int
    """Of them, before anything is corrected."""
    factor: float = 1.0
    """What the expected time was multiplied by; 1 where rates themselves were fitted."""
    within: float = 0.0
    """Relative error of the corrected expected time that 95 % of runs stay below."""
    versions: str = ""
    """Of their libraries, formatted."""

    @property
    def is_used(self) -> bool:
        """Whether there were runs enough."""
        return self.num_runs >= self.needed


@dataclass(frozen=True)
class StepTime:
    """Predicted time of one plan: an estimate."""

    step_s: Span
    """Seconds of one optimizer step."""
    samples_per_s: Span
    """Over all devices."""
    tokens_per_s: Span
    """Over all devices; padding counts."""
    parts: dict[str, float]
    """Expected seconds of each part of a step (`PARTS`); hidden time is not in it, so that they add
    up to `step_s.expected`, but for a calibration's correction."""
    limit: str
    """The largest of them, formatted."""
    mfu: Span | None
    """Share of the datasheet's peak; None where FLOPs or peak are not known."""
    total_s: Span
    """All optimizer steps of the run; without start, evaluation and checkpoints."""
    gpu_hours: Span
    """`total_s` x devices; of CPUs, processes."""
    num_devices: int
    basis: str
    """What the device's rates are known from."""
    notes: tuple[str, ...] = field(default=())
    """What is not modelled, or only widely, each in one clause."""
    calibrated: PaceCalibration | None = None


@dataclass(frozen=True)
class Unknown:
    """No estimate, and what would give one."""

    reason: str
    """In one line."""


PARTS = {
    "compute": "matrix multiplications",
    "memory": "memory bandwidth",
    "optimizer": "the optimizer's memory traffic",
    "host": "the host's kernel launches",
    "transfers": "transfers to and from the host",
    "communication": "communication between devices",
}
"""Part of a step -> what it is limited by."""
