"""Was the machine quiet? What repeats of one configuration, and their times, say about it."""

from collections.abc import Mapping, Sequence
from datetime import datetime

from eke.plan.record import Record
from eke.results.report.compare.measures import SAMPLES
from eke.results.report.compare.noise import Compared
from eke.results.report.compare.variants import Variant

SPREAD = 1.3
"""Times the slowest repeat, above which a baseline's speed says little of what is faster."""

FAR_S = 600.0
"""Between a pair, beyond what its round measured there: a laptop cools down in less."""


def spread(variant: Variant) -> float:
    """Fastest over slowest repeat; 1 where no speed was measured."""
    speeds = variant.sample(SAMPLES.key).values()
    return max(speeds) / min(speeds) if speeds else 1.0


def quiet_notes(
    base: Variant | None, variants: Sequence[Variant], noise: Mapping[str, Compared]
) -> list[str]:
    """Noisy configurations of one machine, and pairs that were measured far apart.

    Args:
        base: the machine's baseline.
        variants: of all machines.
        noise: measure -> comparisons on this machine.
    """
    if base is None:
        return []
    here = [each for each in variants if each.machine == base.machine]
    notes = [
        f"{each.label}: noisier than the others, its repeats' speeds differ by {spread(each):.2f}x"
        for each in here if noise[SAMPLES.key].is_noisy(id(each))
    ]  # fmt: skip
    apart = sorted(_apart(base, here), reverse=True)
    if apart:
        seconds, label = apart[0]
        others = f" (and {len(apart) - 1} more pairs)" if len(apart) > 1 else ""
        notes.append(
            f"a repeat of {label} was measured {seconds / 60:.0f} min apart from the "
            f"baseline's{others}: what the machine did meanwhile is part of the difference"
        )
    return notes


def _apart(base: Variant, variants: Sequence[Variant]) -> list[tuple[float, str]]:
    """Seconds between the ends of a pair, and whose, where its round does not explain them."""
    rounds: dict[tuple[int, int], list[tuple[float, float, Variant]]] = {}
    for each in variants:
        for repeat, record in each.by_repeat():
            if (end := _end(record)) is not None and record.timing.train_s is not None:
                took = record.timing.train_s + (record.timing.startup_s or 0.0)
                rounds.setdefault(repeat, []).append((end, took, each))
    found = []
    for runs in rounds.values():
        start = next((end for end, _, each in runs if each is base), None)
        for end, _, each in runs if start is not None else []:
            first, last = sorted((start or end, end))
            # Twice, for evaluation and what lies between runs.
            busy = 2 * sum(took for moment, took, _ in runs if first < moment <= last)
            if last - first > busy + FAR_S:
                found.append((last - first, each.label))
    return found


def _end(record: Record) -> float | None:
    """When it was written."""
    try:
        return datetime.fromisoformat(str(record.environment.get("time"))).timestamp()
    except ValueError:
        return None
