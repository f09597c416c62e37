"""batch=auto: the largest micro-batch that fits, by formulas, traces and probes.

A micro-batch is only chosen if the high end of its forecast fits, or if a probe of it ran. Memory
grows with the micro-batch, so a binary search is enough. Results of probes and choices are cached
on disk, so that the same command remains the same run.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from eke.common.text import GIB
from eke.estimate.memory import trace_client
from eke.estimate.memory.components import Forecast
from eke.estimate.memory.predict_memory import (
    PYTHON_BYTES,
    available_bytes,
    known_forecast,
    traced_forecast,
)
from eke.plan.planner import Plan

_FORMAT = 1
"""Version of the cached content, increased when its meaning changes."""

CHOICES_FOLDER = "batches"
"""Folder in the cache."""


@dataclass(frozen=True)
class ProbeResults:
    """Results of probes and choices for one configuration on one device."""

    fits: int = 0
    """Largest micro-batch that ran in a probe. 0 if none did."""
    fails: int | None = None
    """Smallest micro-batch that ran out of memory in a probe. None if none did."""
    chosen: dict[str, int] = field(default_factory=dict)
    """Micro-batch of started runs by samples per optimizer step."""

    def has_failed(self, plan: Plan) -> bool:
        """Return whether this micro-batch, or a smaller one, ran out of memory."""
        return self.fails is not None and plan.batch.per_device >= self.fails


def _probe_key(plan: Plan, capacity: int) -> str:
    """Return 32 hex digits, equal for plans that only differ in their micro-batches."""
    batch, eval_size = plan.batch, plan.config.batch.eval_per_device
    content = trace_client.memory_fingerprint(plan) | {
        "seen": _FORMAT,
        "batch": [batch.world_size, batch.devices, eval_size],
        "capacity": capacity,
        "machine": plan.machine,
    }
    return trace_client.digest_of(content)


def _find_probes(key: str) -> ProbeResults:
    return trace_client.read_kept(CHOICES_FOLDER, key, ProbeResults) or ProbeResults()


def note_probe(key: str, size: int, fits: bool) -> ProbeResults:
    """Store the result of a probe, and drop older results that contradict it."""
    seen = _find_probes(key)
    if fits:
        fails = seen.fails if seen.fails is None or seen.fails > size else None
        seen = replace(seen, fits=max(seen.fits, size), fails=fails)
    else:
        fails = min(size, seen.fails or size)
        seen = replace(seen, fits=seen.fits if seen.fits < size else 0, fails=fails)
    trace_client.store_trace_result(CHOICES_FOLDER, key, seen)
    return seen


def note_choice(key: str, target: int, size: int) -> None:
    """Store the micro-batch with which a run is started."""
    seen = _find_probes(key)
    if seen.chosen.get(str(target)) != size:
        seen = replace(seen, chosen={**seen.chosen, str(target): size})
        trace_client.store_trace_result(CHOICES_FOLDER, key, seen)


HOST_BYTES = GIB // 2
"""Bytes of free CPU memory left to other processes, per process besides Python's: a choice."""

MAX_PROBES = 3
"""Most probes in one search. Traces leave one or two micro-batches undecided."""


Probe = Callable[[Plan], bool | None]
"""Runs a plan and returns whether it fits, None if it failed for another reason."""


@dataclass(frozen=True)
class BatchChoice:
    """Result of a search."""

    number: int
    """Index of the chosen plan."""
    fits: bool
    """True if it is known to fit or was chosen before. Otherwise it is the smallest plan."""
    how: str
    """`predicted`, `probed` or `as before`."""


@dataclass
class BatchSearch:
    """Search among the plans of one configuration that differ in their micro-batch."""

    plans: Sequence[Plan]
    """Plans in the order of their micro-batch, the smallest first."""
    capacity: int
    """Bytes for tensors, or for the entire process on a GPU."""
    trace: bool
    """True if to spend seconds on traces if formulas do not decide."""
    probe: Probe | None = None
    """Runs a plan as a test. None if that is not possible."""
    whole: int | None = None
    """Bytes without other processes, by which choices are stored. Probes hold for `capacity`."""

    def __post_init__(self) -> None:
        self.key = _probe_key(self.plans[0], self.whole or self.capacity)
        self._probes = _probe_key(self.plans[0], self.capacity)
        self.known = _find_probes(self._probes)
        self._found: dict[tuple[int, bool], Forecast] = {}

    def run(self) -> BatchChoice:
        """Return the largest plan that fits, or the smallest if none is known to fit."""
        before = _find_probes(self.key).chosen.get(str(self.plans[0].batch.samples_per_step))
        for number, plan in enumerate(self.plans):
            if plan.batch.per_device == before and not self.known.has_failed(plan):
                return BatchChoice(number, fits=True, how="as before")
        best = self._predicted()
        if self.probe is not None:
            best = self._probe_larger(best, self.probe)
        number = max(0, best)
        seen_to_run = self.plans[number].batch.per_device <= self.known.fits
        return BatchChoice(number, best >= 0, "probed" if seen_to_run else "predicted")

    def _predicted(self) -> int:
        """Return the index of the last plan whose high end fits, -1 if none."""
        end = len(self.plans)
        if self.fits(end - 1):  # the most frequent case
            return end - 1
        best = _last(lambda n: self.fits(n) is True, -1, end)
        if self.trace:
            top = _last(lambda n: self.fits(n) is not False, best, end)
            best = _last(lambda n: self.fits(n, traced=True) is True, best, top + 1)
        return best

    def fits(self, number: int, traced: bool = False) -> bool | None:
        """Return whether a plan fits, by probes, else by its forecast, None if undecided."""
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
        """Return the forecast of one plan, by its trace if there is one."""
        if (number, True) in self._found:
            return self._found[number, True]
        if (number, traced) not in self._found:
            look = traced_forecast if traced else known_forecast
            self._found[number, traced] = look(self.plans[number])
        return self._found[number, traced]

    def _probe_larger(self, best: int, probe: Probe) -> int:
        """Probe plans above the best that fits. Return the index of the new best."""

        def is_worthwhile(number: int) -> bool:
            """Return whether to probe. On a CPU, running out of memory affects all processes."""
            if self.fits(number, self.trace) is False:
                return False
            on_cpu = self.plans[number].device.kind == "cpu"
            return not on_cpu or self.forecast(number).peak.expected <= self.capacity

        top = _last(is_worthwhile, best, len(self.plans))
        for _ in range(MAX_PROBES):
            if top <= best:
                break
            middle = (best + top + 1) // 2
            trial = probe(self.plans[middle])
            if trial is None:  # failed for another reason than memory
                break
            self.known = note_probe(self._probes, self.plans[middle].batch.per_device, trial)
            best, top = (middle, top) if trial else (best, middle - 1)
        return best


def _last(holds: Callable[[int], bool], low: int, high: int) -> int:
    """Return the last number below `high` for which `holds`, by bisection, else `low`."""
    return low + bisect_left(range(low + 1, high), True, key=lambda number: not holds(number))


def room_for_a_batch(plan: Plan, share: int = 1) -> int | None:
    """Return the bytes for batch=auto with `share` runs on the device, None if unknown."""
    memory = available_bytes(plan)
    if memory is None or plan.device.kind != "cpu":
        return None if memory is None else memory // share
    each = (memory + PYTHON_BYTES) // share - PYTHON_BYTES  # per run that shares the machine
    return max(0, each - reserve_of(plan))


def reserve_of(plan: Plan) -> int:
    """Return the bytes for tensors that batch=auto leaves to other processes."""
    return HOST_BYTES if plan.device.kind == "cpu" else 0
