"""Corrections of forecasts from finished runs: of this device, with these versions, by this method.

A pair is what was predicted and what was measured of one configuration. Of a group of pairs the
median of the logarithms of measured over predicted corrects the expected value, where it differs
from zero by more than chance; an interval for one more run says how far off that may be. The low
end, which refuses, is never moved (docs/explanation/forecast.md).

Store of finished runs on disk: one file per comparable group, one line per run.

Memory (`eke.estimate.memory.calibration`) and time (`eke.estimate.time.time_history`) keep their
observations here. Errors never stop a run or a plan: failed writes are lost, unreadable files count
as missing. Files are appended to by single writes, so that concurrent runs do not mix their lines,
and cut to their newest lines when they have grown to twice as many; a line that another run appends
in that instant is lost, which costs one observation.

Pairs of predicted and measured memory, kept in the files of `history_store`.
"""

import dataclasses
import hashlib
import json
import math
import os
import stat
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypeVar

from eke.common.files import append_line, own_folder, read_text, seal, write_atomic
from eke.data.sources import cache_folder
from eke.estimate.memory.components import Calibrated, Forecast, Range, doubts_of
from eke.estimate.memory.trace_client import trace_key
from eke.hardware.fingerprint import LIBRARIES, installed_versions, package_folder, source_hash
from eke.plan.identity import canonical
from eke.plan.planner import Plan
from eke.plan.record import Outcome, Record

NEEDED = 5
"""Configurations of a group before a correction is made: all five on one side of the truth happen
in 6 % of cases (2 * 0.5^5), four in 12 %, and Student's interval widens quickly below."""

CONFIDENCE = 0.95

LARGEST_RATIO = 64.0
"""A pair further off than this is not a forecast's error but a broken file."""


@dataclass(frozen=True)
class Pair:
    """One finished run; bytes of the same quantity."""

    key: str
    """Of its plan (`trace_client.key_of`): one configuration is one observation."""
    run_id: str
    predicted: int
    """As forecast, never as corrected: corrections do not feed on themselves."""
    measured: int

    @property
    def log_ratio(self) -> float:
        """Natural logarithm of measured over predicted: 0 where the forecast was right."""
        return math.log(self.measured / self.predicted)

    @property
    def is_sane(self) -> bool:
        """Whether its values are plausible."""
        if not (self.key and self.run_id and self.predicted > 0 and self.measured > 0):
            return False
        return 1 / LARGEST_RATIO < self.measured / self.predicted < LARGEST_RATIO


@dataclass(frozen=True)
class Correction:
    """Correction of the next run's forecast by a group of pairs."""

    num_runs: int
    """Different configurations."""
    factor: float
    """Measured over predicted, as it is to be expected; 1 where no bias is seen."""
    within: float
    """Half the width of the interval, as a natural logarithm: about a relative error."""


def one_of_each(pairs: Iterable[Pair]) -> list[Pair]:
    """The newest pair of each configuration, in their order."""
    return list({pair.key: pair for pair in pairs if pair.is_sane}.values())


def correction_of(pairs: Iterable[Pair]) -> Correction | None:
    """The correction of a group, and how sure it is; None where there are too few.

    The interval is Student's for one more observation: t(n - 1) * s * sqrt(1 + 1/n), with s about
    the centre that is used (Hahn & Meeker 1991, Statistical Intervals, section 4.7). Errors of
    forecasts have heavier tails than the normal distribution, so it is never narrower than the
    largest deviation that was seen.

    Args:
        pairs: of one group, the newest last.
    """
    ratios = [pair.log_ratio for pair in one_of_each(pairs)]
    count = len(ratios)
    if count < NEEDED:
        return None
    centre = statistics.median(ratios)
    low, high = median_interval(ratios)
    if low <= 0 <= high:  # chance would do
        centre = 0.0
    deviations = [ratio - centre for ratio in ratios]
    spread = math.sqrt(sum(d * d for d in deviations) / (count - 1))
    student = t_quantile((1 + CONFIDENCE) / 2, count - 1) * spread * math.sqrt(1 + 1 / count)
    return Correction(count, math.exp(centre), max(student, *(abs(d) for d in deviations)))


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Order statistics between which the median lies with about `CONFIDENCE`, whatever the shape.

    Signs about the true median are fair coins (Conover 1999, Practical Nonparametric Statistics,
    section 3.2). Of five values all of them: 94 %.
    """
    ordered = sorted(values)
    count, tail, cut = len(ordered), 0.0, 0
    while True:
        tail += math.comb(count, cut) / 2**count
        if tail > (1 - CONFIDENCE) / 2:
            break
        cut += 1
    cut = max(1, cut)
    return ordered[cut - 1], ordered[count - cut]


def t_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's distribution."""
    from scipy.special import stdtrit  # here: 0.1 s, and only where there are runs enough

    return float(stdtrit(degrees, probability))


def corrected(found: Range, fitted: Correction) -> Range:
    """A range with its expected value corrected and its high end where the interval ends.

    The low end stays: what no correct implementation can do without is no matter of experience.
    """
    expected = max(found.low, round(found.expected * fitted.factor))
    return Range(found.low, expected, max(expected, math.ceil(expected * math.exp(fitted.within))))


def calibrate(found: Forecast, pairs: Sequence[Pair], versions: str) -> Forecast:
    """A forecast with what the pairs of its group add to it; its own numbers stay what they are.

    Args:
        found: by formulas or traces.
        pairs: of its group.
        versions: of their libraries, formatted.
    """
    fitted = correction_of(pairs)
    if fitted is None:
        few = len(one_of_each(pairs))
        return replace(found, calibrated=Calibrated(None, None, few, NEEDED, 1.0, 0.0, versions))
    return replace(
        found,
        calibrated=Calibrated(
            peak=corrected(found.peak, fitted),
            allocated=corrected(found.allocated, fitted),
            num_runs=fitted.num_runs,
            needed=NEEDED,
            factor=fitted.factor,
            within=math.expm1(fitted.within),
            versions=versions,
        ),
    )


FOLDER = "EKE_CALIBRATION"
"""Environment variable: where the files lie, if not in the cache folder."""

SHOWN = ("torch", "transformers")
"""Libraries that are named with a correction."""

KEPT_LINES = 200
"""Newest runs of a group."""

KEPT_FILES = 200
"""Newest groups; 200 lines of 200 bytes each are 8 MB in all."""

LONGEST_FILE = 4 * 2**20
"""Bytes; a larger file was not written here."""

Group = dict[str, Any]

T = TypeVar("T")


@cache
def software(*packages: str) -> dict[str, str]:
    """What a group has in common besides its runs' own facts: eke's formulas, and libraries.

    Args:
        packages: of eke, that make a prediction or what is measured: once they change, old lines no
            longer count.
    """
    hashes = [source_hash(package_folder() / name) for name in packages]
    return {"formulas": " ".join(hashes), **installed_versions(LIBRARIES)}


def versions_of(group: Group) -> str:
    """The versions that matter most, formatted."""
    return ", ".join(f"{name} {group[name]}" for name in SHOWN if name in group)


def folder() -> Path:
    """Where the files lie."""
    own = os.environ.get(FOLDER)
    return Path(own) if own else cache_folder() / "calibration"


def path_of(group: Group) -> Path:
    """The file of a group."""
    return folder() / f"{hashlib.sha256(canonical(group).encode()).hexdigest()[:32]}.jsonl"


def read_lines(
    path: Path, parse: Callable[[str], T | None], key: Callable[[T], str]
) -> tuple[T, ...]:
    """Parsed lines of a group's file, the newest last; empty if unreadable.

    Args:
        path: of the file.
        parse: parses a line; None if truncated or implausible.
        key: of what was said; of those with the same one the newest counts, in the oldest's place.
    """
    try:
        if not _is_readable(path):
            return ()
        found = path.stat()
        return _parsed(path, found.st_mtime_ns, found.st_size, parse, key)
    except (OSError, ValueError):
        return ()


@lru_cache(maxsize=64)  # called for each job of a sweep
def _parsed(
    path: Path,
    changed_ns: int,
    size: int,
    parse: Callable[[str], Any],
    key: Callable[[Any], str],
) -> tuple[Any, ...]:
    """The lines of a file, remembered until its time of change or size are others."""
    lines = read_text(path, LONGEST_FILE).splitlines()
    found = [each for line in lines if (each := parse(line)) is not None]
    return tuple({key(each): each for each in found}.values())[-KEPT_LINES:]


def _is_readable(path: Path) -> bool:
    """Whether it is a file of a size that is written here: a pipe would be waited for."""
    found = path.stat()
    return stat.S_ISREG(found.st_mode) and found.st_size <= LONGEST_FILE


def add_line(path: Path, line: str) -> None:
    """Append to a group's file, and keep it and their number within bounds; lost if impossible."""
    try:
        own_folder(path.parent)
        if path.exists() and not _is_readable(path):
            return
        seal(path)
        append_line(path, line)
        _shorten(path)
        _forget_old(path.parent)
    except OSError:
        return


def _shorten(path: Path) -> None:
    """Keep the newest lines of a file that has twice as many."""
    lines = read_text(path, LONGEST_FILE).splitlines()
    if len(lines) > 2 * KEPT_LINES:
        write_atomic(path, "\n".join(lines[-KEPT_LINES:]) + "\n")


def _forget_old(within: Path) -> None:
    """Remove the files that were longest not written to, of groups beyond those that are kept."""
    files: Sequence[Path] = list(within.glob("*.jsonl"))
    if len(files) > KEPT_FILES:
        newest_last = sorted(files, key=lambda file: file.stat().st_mtime)
        for file in newest_last[:-KEPT_FILES]:
            file.unlink(missing_ok=True)


SOURCES = ("estimate", "models", "training")
"""Packages of eke that make a prediction, or what is measured: once they change, old pairs say
nothing."""


def memory_group(plan: Plan, method: str) -> Group:
    """Properties that runs must share for their forecasts to be comparable.

    Args:
        plan: of the run.
        method: a value of `eke.estimate.memory.Method`.
    """
    return {
        "device": plan.device.name,
        "kind": plan.device.kind,
        "method": method,
        "distributed": plan.config.distributed.option,
        "offload": plan.config.offload.option,
        "doubts": sorted(doubt.value for doubt in doubts_of(plan)),
        **software(*SOURCES),
    }


def read_pairs(group: Group) -> list[Pair]:
    """Pairs of a group, the newest last, one for each run; none where nothing readable is."""
    return list(read_lines(path_of(group), _parsed_pair, _run))


def _run(pair: Pair) -> str:
    return pair.run_id


def _parsed_pair(line: str) -> Pair | None:
    """The pair of a line; None if truncated or implausible."""
    try:
        content = json.loads(line)
        pair = Pair(
            key=content["key"],
            run_id=content["run_id"],
            predicted=content["predicted"],
            measured=content["measured"],
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    numbers = (pair.predicted, pair.measured)
    if not all(type(number) is int for number in numbers):
        return None
    if not (isinstance(pair.key, str) and isinstance(pair.run_id, str)):
        return None
    return pair if pair.is_sane else None


def pair_of(plan: Plan, record: Record) -> Pair | None:
    """Observation of a finished run; None if it measured nothing that was predicted.

    On a CPU sums of tensors; on a GPU what was reserved, with the driver's context as predicted,
    which no counter of PyTorch's has.
    """
    predicted, measured = record.memory.predicted, record.memory.measured
    if record.outcome != Outcome.ok.value or predicted is None or measured is None:
        return None
    if plan.device.kind == "cpu":
        if record.effective.get("skipped_steps"):  # the step looked at may have had no states
            return None
        expected, truth = predicted.allocated_bytes, measured.peak_allocated_bytes
    else:
        reserved = measured.peak_reserved_bytes
        context = predicted.components.get("context", 0)
        expected, truth = predicted.expected, None if reserved is None else reserved + context
    if not expected or not truth:
        return None
    pair = Pair(trace_key(plan), record.run_id, expected, truth)
    return pair if pair.is_sane else None


def note_pair(plan: Plan, record: Record) -> None:
    """Store a finished run's forecast error, if possible."""
    pair = pair_of(plan, record)
    if pair is None:
        return
    assert record.memory.predicted is not None
    group = memory_group(plan, record.memory.predicted.method)
    add_line(path_of(group), json.dumps(dataclasses.asdict(pair)))
