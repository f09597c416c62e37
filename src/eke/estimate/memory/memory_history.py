"""Pairs of predicted and measured memory, kept in the files of `history_store`."""

import dataclasses
import json

from eke.estimate.memory.cache import key_of
from eke.estimate.memory.calibration import Pair
from eke.estimate.memory.history_store import Group, add_line, path_of, read_lines, software
from eke.estimate.memory.notes import notes_of
from eke.plan.planner import Plan
from eke.plan.record import Outcome, Record

SOURCES = ("build", "forecast", "memory", "sizes")
"""Packages of eke that make a prediction, or what is measured: once they change, old pairs say
nothing."""


def group_of(plan: Plan, method: str) -> Group:
    """What runs must have in common to say something of each other's forecasts.

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
        "doubts": sorted(notes_of(plan)),
        **software(*SOURCES),
    }


def read_pairs(group: Group) -> list[Pair]:
    """Pairs of a group, the newest last, one for each run; none where nothing readable is."""
    return list(read_lines(path_of(group), _parsed, _run))


def _run(pair: Pair) -> str:
    return pair.run_id


def _parsed(line: str) -> Pair | None:
    """The pair of a line; None for one that is torn or says what cannot be."""
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
    """What a finished run adds; None where it measured nothing that was predicted.

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
    pair = Pair(key_of(plan), record.run_id, expected, truth)
    return pair if pair.is_sane else None


def note_pair(plan: Plan, record: Record) -> None:
    """Keep what a finished run says of its forecast; nothing where that is not possible."""
    pair = pair_of(plan, record)
    if pair is None:
        return
    assert record.memory.predicted is not None
    group = group_of(plan, record.memory.predicted.method)
    add_line(path_of(group), json.dumps(dataclasses.asdict(pair)))
