"""Advice for runs that run out of memory: overrides whose forecast fits, mildest first.

Proposals are techniques of the table (eke.rules.techniques) and smaller micro-batches; each is
checked by the rules and forecast.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod

from eke.common.errors import ConfigError
from eke.config.schema import Config, PretrainedModel
from eke.estimate.memory.components import Forecast, Verdict
from eke.estimate.memory.predict_memory import known_forecast
from eke.models.sizes import predicted_frac
from eke.plan.planner import Plan, replan
from eke.rules import NOT_BY_SIZE, Facts, check
from eke.rules.techniques import (
    CPU,
    QUARTER_BATCH,
    TECHNIQUES,
    Technique,
    fused_loss_share,
    precision_slowdown,
)


@dataclass(frozen=True)
class Change:
    """One way to need less memory."""

    overrides: tuple[str, ...]
    config: Config
    """With the overrides."""
    slowdown: float | None
    """Time of a step over what it is now; None where it depends on the machine alone."""
    reason: str
    """Source of the slowdown, in one clause."""
    keeps: bool = True
    """Trains the same but for rounding."""


Saver = Callable[[Plan], Iterator[Change]]


def smaller_batches(plan: Plan) -> Iterator[Change]:
    """The same samples per step in smaller micro-batches, the largest first."""
    config, size = plan.config, plan.batch.per_device
    for part in range(size - 1, 0, -1):
        if size % part:
            continue
        overrides = [f"batch.per_device={part}"]
        batch = replace(config.batch, per_device=part)
        if config.batch.target is None:
            count = plan.batch.accumulation * (size // part)
            overrides.append(f"batch.accumulation={count}")
            batch = replace(batch, accumulation=count)
        slowdown = QUARTER_BATCH.slowdown ** (math.log2(size / part) / 2)
        reason = f"4 times smaller: {QUARTER_BATCH.source}"
        yield Change(tuple(overrides), replace(config, batch=batch), slowdown, reason)


def _saver(*names: str) -> Saver:
    """Techniques of the table, in this order, where they apply."""

    def changes(plan: Plan) -> Iterator[Change]:
        for technique in (TECHNIQUES[name] for name in names):
            permitted = technique.applies is not None and technique.applies(plan.config)
            if not permitted or plan.device.kind not in technique.devices:
                continue
            overrides = technique.overrides
            if technique.group == "distributed":
                count = plan.config.distributed.num_processes
                overrides = (*overrides, f"distributed.num_processes={count}")
            changed = technique.apply(plan.config)
            slowdown = _slowdown(technique, plan, changed)
            yield Change(overrides, changed, slowdown, technique.reason, technique.keeps_training)

    return changes


def _slowdown(technique: Technique, plan: Plan, changed: Config) -> float | None:
    """Time of a step over what it is now; the vocabulary's projection is counted by its size."""
    num_matmul = plan.size.num_matmul_parameters
    if technique.name == "kernels=sparse_prediction":
        projection = changed.model.vocab_size * changed.model.hidden_size
        return 1 - (1 - predicted_frac(changed)) * projection / max(projection, num_matmul)
    if technique.name == "kernels=fused_linear_cross_entropy":
        return 1 + fused_loss_share(plan.config, num_matmul)
    if technique.group != "precision":
        return technique.slowdown
    relative = (technique.slowdown or 1.0) / precision_slowdown(plan.config)
    # A processor's units for 16 bits may be fast, slow or missing.
    return None if plan.device.kind == CPU and relative != 1.0 else relative


SAVERS: tuple[Saver, ...] = (
    _saver("attention=sdpa"),
    _saver("kernels=sparse_prediction"),
    _saver("kernels=fused_linear_cross_entropy"),
    smaller_batches,
    _saver("memory=checkpointing_selective", "memory=checkpointing"),
    _saver("precision=bf16", "precision=bf16_pure"),
    _saver("precision=tf32", "precision=fp32"),
    _saver("optimizer=adamw_8bit", "optimizer=adafactor"),
    _saver("distributed=zero2", "distributed=zero3", "distributed=fsdp"),
    _saver("offload=optimizer_cpu"),
    _saver("peft=lora", "peft=qlora"),
)
"""Milder changes first; at most one change of each is proposed."""


Judge = Callable[[Plan, Plan], tuple[float, str] | None]
"""A time model: of a plan and a changed one, how much longer a sample takes, and where that is
known from; None where it does not know the device. `eke.estimate.time`, above this package, has
one."""

UNKNOWN_SLOWDOWN = 2.0
"""Rank of a change whose cost depends on the machine: behind all that are known."""

ROOM = (Verdict.fits, Verdict.tight)
"""Proposed: the expected peak fits."""


@dataclass(frozen=True)
class Advice:
    """One set of overrides that reduces memory."""

    overrides: tuple[str, ...]
    plan: Plan
    """With them."""
    forecast: Forecast
    """Of that plan."""
    slowdown: float | None
    """Time of a step over what it is now; None where it is not known."""
    reasons: tuple[str, ...]
    """Source of each change's slowdown."""
    keeps: bool
    """The training computes the same, but for rounding."""

    @property
    def rank(self) -> tuple[bool, bool, bool, float, int]:
        """Sort key: equivalent training first, then spare memory, low cost and few overrides.

        Adapters of random weights learn little: only where nothing else helps.
        """
        config = self.plan.config
        learns_little = config.peft.option != "none" and not isinstance(
            config.model, PretrainedModel
        )
        slowdown = UNKNOWN_SLOWDOWN if self.slowdown is None else self.slowdown
        tight = self.forecast.verdict is not Verdict.fits
        return not self.keeps, learns_little, tight, slowdown, len(self.overrides)


def advise(plan: Plan, count: int = 5, judge: Judge | None = None) -> list[Advice]:
    """Overrides with which the plan's expected peak fits, ranked.

    Single changes, and pairs whose changes do not suffice alone; if none suffices, pairs with the
    smallest micro-batch.

    Args:
        plan: the plan that does not fit, or barely fits.
        count: proposals at most.
        judge: estimates the cost of changes on this device; by default published figures.
    """
    tried = {saver: _best_of(plan, saver, judge) for saver in SAVERS}
    found = [advice for each in tried.values() for advice in each]
    if len(found) < count or not any(advice.keeps for advice in found):
        too_little = [saver for saver, each in tried.items() if not each]
        found += _pairs(plan, too_little, judge)
    return ranked(found or _pairs_of_the_smallest(plan, judge))[:count]


def first_advice(plan: Plan, judge: Judge | None = None) -> Advice | None:
    """The best of all; `judge` as in `advise`. Another training only where nothing else helps."""
    kept = [((change,) for change in saver(plan) if change.keeps) for saver in SAVERS]
    found = [advice for options in kept for advice in _mildest(plan, options, judge)]
    return next(iter(ranked(found) or advise(plan, 1, judge)), None)


def ranked(found: Iterable[Advice]) -> list[Advice]:
    """Best first."""
    return sorted(found, key=lambda advice: advice.rank)


def _best_of(plan: Plan, saver: Saver, judge: Judge | None) -> list[Advice]:
    """The mildest changes of one saver that are enough by themselves."""
    return _mildest(plan, ((change,) for change in saver(plan)), judge)


def _pairs(plan: Plan, savers: Sequence[Saver], judge: Judge | None) -> list[Advice]:
    """The first pair of savers that suffices."""
    return [
        advice
        for one, other in combinations(savers, 2)
        for advice in _mildest(plan, _each_pair(plan, one, other), judge)
    ]


def _pairs_of_the_smallest(plan: Plan, judge: Judge | None) -> list[Advice]:
    """The first pair of savers that suffices with the smallest micro-batch."""
    smallest = next(reversed(list(smaller_batches(plan))), None)
    base = _replanned(plan, smallest) if smallest else None
    if smallest is None or base is None:
        return []
    others = [saver for saver in SAVERS if saver is not smaller_batches]
    return [
        advice
        for one, other in combinations(others, 2)
        for advice in _mildest(
            plan, ((smallest, *pair) for pair in _each_pair(base, one, other)), judge
        )
    ]


def _each_pair(plan: Plan, one: Saver, other: Saver) -> Iterator[tuple[Change, Change]]:
    for first in one(plan):
        changed = _replanned(plan, first)
        if changed is not None:
            yield from ((first, second) for second in other(changed))


def _mildest(
    plan: Plan, options: Iterable[tuple[Change, ...]], judge: Judge | None
) -> list[Advice]:
    """The first option with spare memory, of the equivalent ones and of the others.

    If none has any, the first tight one.
    """
    found: dict[bool, Advice] = {}
    for changes in options:
        known = found.get(all(change.keeps for change in changes))
        if known is not None and known.forecast.verdict is Verdict.fits:
            continue
        advice = _tried(plan, changes, judge)
        if advice is not None and (known is None or advice.forecast.verdict is Verdict.fits):
            found[advice.keeps] = advice
    return list(found.values())


def _replanned(plan: Plan, change: Change) -> Plan | None:
    """The plan with a change; None if rejected by a rule other than a memory bound."""
    refused, _ = check(Facts(change.config, plan.device, planning=True), NOT_BY_SIZE)
    if refused:
        return None
    try:
        return replan(plan, change.config)
    except ConfigError:
        return None


def _tried(plan: Plan, changes: tuple[Change, ...], judge: Judge | None) -> Advice | None:
    """Advice if the last of the cumulative changes fits."""
    changed = _replanned(plan, changes[-1])
    if changed is None:
        return None
    found = known_forecast(changed)
    if found.verdict not in ROOM:
        return None
    known = [change.slowdown for change in changes if change.slowdown is not None]
    slowdown = prod(known) if len(known) == len(changes) else None
    reasons = tuple(change.reason for change in changes)
    judged = judge(plan, changed) if judge else None
    if judged is not None:
        slowdown, reasons = judged[0], (judged[1],)
    return Advice(
        overrides=tuple(text for change in changes for text in change.overrides),
        plan=changed,
        forecast=found,
        slowdown=slowdown,
        reasons=reasons,
        keeps=all(change.keeps for change in changes),
    )
