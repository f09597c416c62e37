"""batch=auto: the largest micro-batch that fits, by formulas, traces and probes.

A micro-batch is chosen only if the high end of its forecast fits, or if it was seen to run. Memory
grows with the micro-batch, so halving the list of those that are possible is enough. Results of
probes are kept on disk, and so are choices, so that the same command stays the same run.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from eke.common.text import GIB
from eke.estimate.memory import trace_client
from eke.estimate.memory.components import Forecast
from eke.estimate.memory.predict_memory import PYTHON_BYTES, known_forecast, room, traced_forecast
from eke.plan.planner import Plan

FORMAT = 1
"""Raise it when what is kept changes its meaning."""

FOLDER = "batches"
"""Of the cache."""


@dataclass(frozen=True)
class Seen:
    """Micro-batches of one configuration on one device."""

    fits: int = 0
    """The largest that a probe ran with; 0 where none did."""
    fails: int | None = None
    """The smallest that a probe ran out of memory with."""
    chosen: dict[str, int] = field(default_factory=dict)
    """Samples per optimizer step -> the micro-batch that runs were started with."""

    def has_failed(self, plan: Plan) -> bool:
        """Whether such a micro-batch, or a smaller one, ran out of memory."""
        return self.fails is not None and plan.batch.per_device >= self.fails


def probe_key(plan: Plan, capacity: int) -> str:
    """32 hex digits: the same for plans that differ in nothing but how their steps are cut."""
    batch, eval_size = plan.batch, plan.config.batch.eval_per_device
    content = trace_client.what_counts(plan) | {
        "seen": FORMAT,
        "batch": [batch.world_size, batch.devices, eval_size],
        "capacity": capacity,
        "machine": plan.machine,
    }
    return trace_client.digest_of(content)


def find_probes(key: str) -> Seen:
    """Entry of a key; empty if unreadable."""
    return trace_client.read_kept(FOLDER, key, Seen) or Seen()


def note_probe(key: str, size: int, fits: bool) -> Seen:
    """Keep how a probe ended; what contradicts it is older, and forgotten."""
    seen = find_probes(key)
    if fits:
        fails = seen.fails if seen.fails is None or seen.fails > size else None
        seen = replace(seen, fits=max(seen.fits, size), fails=fails)
    else:
        fails = min(size, seen.fails or size)
        seen = replace(seen, fits=seen.fits if seen.fits < size else 0, fails=fails)
    trace_client.keep(FOLDER, key, seen)
    return seen


def note_choice(key: str, target: int, size: int) -> None:
    """Keep what a run is started with."""
    seen = find_probes(key)
    if seen.chosen.get(str(target)) != size:
        seen = replace(seen, chosen={**seen.chosen, str(target): size})
        trace_client.keep(FOLDER, key, seen)


HOST_BYTES = GIB // 2
"""Free memory of a CPU that a micro-batch leaves to other processes, per process and in addition to
Python's. A choice, not a measurement."""

MAX_PROBES = 3
"""Trials of one search. Micro-batches that keep the samples per step are often twice the one
before, and traces leave one or two of them open."""


Probe = Callable[[Plan], bool | None]
"""Whether a plan ran; None where it ended for a reason unrelated to memory."""


@dataclass(frozen=True)
class Chosen:
    """Search result."""

    number: int
    """Of the plan chosen, among those that are possible."""
    fits: bool
    """It is known to fit, or was taken before; else it is the smallest there is."""
    how: str
    """`predicted`, `probed` or `as before`."""


@dataclass
class BatchSearch:
    """A search among the plans of one configuration that differ in their micro-batch."""

    plans: Sequence[Plan]
    """The smallest micro-batch first."""
    capacity: int
    """Bytes that tensors, or the whole of a GPU's process, may have."""
    trace: bool
    """Spend seconds on traces where formulas cannot tell."""
    probe: Probe | None = None
    """Tries a plan out; None where that is not possible."""
    whole: int | None = None
    """Bytes if no other process used the device. Choices are stored by these, independent of what
    others hold of a CPU's memory; a probe holds for the memory that was free when it was made."""

    def __post_init__(self) -> None:
        self.key = probe_key(self.plans[0], self.whole or self.capacity)
        self._probes = probe_key(self.plans[0], self.capacity)
        self.known = find_probes(self._probes)
        self._found: dict[tuple[int, bool], Forecast] = {}

    def run(self) -> Chosen:
        """The largest that fits; the smallest where none is known to."""
        before = find_probes(self.key).chosen.get(str(self.plans[0].batch.samples_per_step))
        for number, plan in enumerate(self.plans):
            if plan.batch.per_device == before and not self.known.has_failed(plan):
                return Chosen(number, fits=True, how="as before")
        best = self._predicted()
        if self.probe is not None:
            best = self._tried_out(best, self.probe)
        number = max(0, best)
        seen_to_run = self.plans[number].batch.per_device <= self.known.fits
        return Chosen(number, best >= 0, "probed" if seen_to_run else "predicted")

    def _predicted(self) -> int:
        """The last whose high end fits; -1 if none."""
        end = len(self.plans)
        if self.room(end - 1):  # most often, so it is checked first
            return end - 1
        best = _last(lambda n: self.room(n) is True, -1, end)
        if self.trace:
            top = _last(lambda n: self.room(n) is not False, best, end)
            best = _last(lambda n: self.room(n, traced=True) is True, best, top + 1)
        return best

    def room(self, number: int, traced: bool = False) -> bool | None:
        """Whether a plan fits, as observed, else as forecast; None where that cannot tell."""
        plan = self.plans[number]
        if plan.batch.per_device <= self.known.fits:
            return True
        if self.known.has_failed(plan):
            return False
        peak = self.forecast(number, traced).peak
        if peak.high <= self.capacity:
            return True
        return False if peak.low > self.capacity else None

    def forecast(self, number: int, traced: bool = False) -> Forecast:
        """Of one plan; a trace once made is used for all that follows."""
        if (number, True) in self._found:
            return self._found[number, True]
        if (number, traced) not in self._found:
            look = traced_forecast if traced else known_forecast
            self._found[number, traced] = look(self.plans[number])
        return self._found[number, traced]

    def _tried_out(self, best: int, probe: Probe) -> int:
        """Probe what is open above the best known to fit; returns the best that is known then."""

        def is_worthwhile(number: int) -> bool:
            """On a CPU what is expected not to fit is not tried: all processes would suffer."""
            if self.room(number, self.trace) is False:
                return False
            on_cpu = self.plans[number].device.kind == "cpu"
            return not on_cpu or self.forecast(number).peak.expected <= self.capacity

        top = _last(is_worthwhile, best, len(self.plans))
        for _ in range(MAX_PROBES):
            if top <= best:
                break
            middle = (best + top + 1) // 2
            trial = probe(self.plans[middle])
            if trial is None:
                break
            self.known = note_probe(self._probes, self.plans[middle].batch.per_device, trial)
            best, top = (middle, top) if trial else (best, middle - 1)
        return best


def _last(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The last number below `high` for which something holds, found by halving; else `low`."""
    return low + bisect_left(range(low + 1, high), True, key=lambda number: not holds(number))


def room_for_a_batch(plan: Plan, share: int = 1) -> int | None:
    """Bytes that batch=auto may fill, with `share` runs on the device; None if not known."""
    memory = room(plan)
    if memory is None or plan.device.kind != "cpu":
        return None if memory is None else memory // share
    each = (memory + PYTHON_BYTES) // share - PYTHON_BYTES  # of a run that shares the machine
    return max(0, each - reserve_of(plan))


def reserve_of(plan: Plan) -> int:
    """Bytes of what tensors may have that batch=auto leaves to others."""
    return HOST_BYTES if plan.device.kind == "cpu" else 0
