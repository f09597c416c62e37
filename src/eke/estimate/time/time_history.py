"""Finished runs as observations of the time model, on disk beside those of memory.

The files, their bounds and what becomes of broken ones are `eke.estimate.memory.history_store`'s.
"""

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any

from eke.estimate.memory.cache import digest_of, what_counts
from eke.estimate.memory.history_store import Group, add_line, path_of, read_lines, software
from eke.estimate.time.predict import prior_time
from eke.estimate.time.values import StepTime
from eke.estimate.time.work import Work, work_of
from eke.hardware import usable_cores
from eke.plan.planner import Plan
from eke.plan.record import Outcome, Record

SOURCES = ("build", "forecast", "pace", "sizes")
"""Packages of eke that make a prediction, or the step that is timed."""

FEWEST_STEPS = 3
"""Timed steps of a run that is to tell anything."""

LARGEST_RATIO = 1000.0
"""A step further off its prediction than this was interrupted, or its file is broken."""


@dataclass(frozen=True)
class Observation:
    """One finished run."""

    key: str
    """Of its plan: one configuration is one observation."""
    run_id: str
    amounts: dict[str, float]
    """What its step did: FLOPs by format, bytes moved, launches."""
    predicted: float
    """Expected seconds by datasheets, never as corrected; 0 where there were none."""
    measured: float
    """Seconds of one optimizer step, the median."""

    @property
    def is_sane(self) -> bool:
        """Whether it can be what it says."""
        numbers = (self.predicted, self.measured, *self.amounts.values())
        if not all(isinstance(n, int | float) and math.isfinite(n) and n >= 0 for n in numbers):
            return False
        if not (self.key and self.run_id and self.measured > 0):
            return False
        if not self.predicted:
            return True
        return 1 / LARGEST_RATIO < self.measured / self.predicted < LARGEST_RATIO


def amounts_of(plan: Plan, work: Work) -> dict[str, float]:
    """What a step does, by kinds that take time in proportion."""
    name = plan.compute.matmul
    linear = sum(each.flops for each in work.products)
    operands = sum(each.moved for each in work.products)
    found = {
        name: linear + work.updates.flops,
        "moved": operands + work.moved.expected + work.updates.moved.expected,
        "launches": work.launches.expected + work.updates.launches,
    }
    return {kind: float(amount) for kind, amount in found.items()}


def group_of(plan: Plan) -> Group:
    """What runs must have in common to say something of each other's speed."""
    config = plan.config
    return {
        "about": "pace",
        "device": plan.device.name,
        "kind": plan.device.kind,
        "cores": usable_cores() if plan.device.kind == "cpu" else 0,
        "processes": plan.batch.world_size * plan.batch.devices,
        "distributed": config.distributed.option,
        "offload": config.offload.option,
        "compile": config.compile.option,
        "engine": config.engine.option,
        **software(*SOURCES),
    }


def key_of(plan: Plan) -> str:
    """The same for plans whose steps do the same work."""
    data = plan.config.data
    lengths = [getattr(data, name, None) for name in ("lengths", "min_len", "median_len", "sigma")]
    return digest_of({
        **what_counts(plan),
        "tf32": plan.compute.tf32,
        "lengths": [str(value) for value in lengths],
    })  # fmt: skip


def observation_of(plan: Plan, record: Record) -> Observation | None:
    """What a finished run adds; None where no claim about speed can be made of it."""
    steps = record.timing.steady_step_s
    if record.outcome != Outcome.ok.value or steps is None or steps.n < FEWEST_STEPS:
        return None
    if record.shared_device or plan.probe or not steps.median > 0:
        return None
    work = work_of(plan)
    prior = prior_time(plan, work)
    predicted = prior.step_s.expected if isinstance(prior, StepTime) else 0.0
    amounts = amounts_of(plan, work)
    found = Observation(key_of(plan), record.run_id, amounts, predicted, steps.median)
    return found if found.is_sane else None


def note_pace(plan: Plan, record: Record) -> None:
    """Keep what a finished run says of its step's time; nothing where that is not possible."""
    found = observation_of(plan, record)
    if found is not None:
        add_line(path_of(group_of(plan)), json.dumps(dataclasses.asdict(found)))


def read_observations(group: Group) -> tuple[Observation, ...]:
    """Of a group, the newest last, one for each configuration."""
    return read_lines(path_of(group), _parsed, _key)


def _key(found: Observation) -> str:
    return found.key


def _parsed(line: str) -> Observation | None:
    """The observation of a line; None for one that is torn or says what cannot be."""
    try:
        content: dict[str, Any] = json.loads(line)
        amounts = {str(kind): float(amount) for kind, amount in content["amounts"].items()}
        found = Observation(
            key=str(content["key"]),
            run_id=str(content["run_id"]),
            amounts=amounts,
            predicted=float(content["predicted"]),
            measured=float(content["measured"]),
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return None
    return found if found.is_sane else None
