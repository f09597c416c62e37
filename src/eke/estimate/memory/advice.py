"""Advice for runs that run out of memory: overrides whose forecast fits, mildest first.

Proposals are techniques of the table (eke.rules.techniques) and smaller micro-batches; each is
checked by the rules and forecast.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod
from typing import TypeVar

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
    Technique,
    applicable,
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
        for technique, changed in applicable(plan.config, names):
            if plan.device.kind in technique.devices:
                overrides = technique.overrides
                if technique.group == "distributed":
                    count = plan.config.distributed.num_processes
                    overrides = (*overrides, f"distributed.num_processes={count}")
                slowdown = _slowdown(technique, plan, changed)
                keeps = technique.keeps_training
                yield Change(overrides, changed, slowdown, technique.reason, keeps)

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

T = TypeVar("T")


def mildest(options: Iterable[T], forecast_of: Callable[[T], Forecast]) -> T | None:
    """The first option that fits, else the first that may just fit; None where none does.

    Args:
        options: the mildest first; none is looked at after one that fits.
        forecast_of: the forecast of an option.
    """
    tight = None
    for option in options:
        verdict = forecast_of(option).verdict
        if verdict is Verdict.fits:
            return option
        if verdict is Verdict.tight and tight is None:
            tight = option
    return tight


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
    tried = {saver: _sufficient(plan, _combined(plan, saver), judge) for saver in SAVERS}
    found = [advice for each in tried.values() for advice in each]
    if len(found) < count or not any(advice.keeps for advice in found):
        too_little = [saver for saver, each in tried.items() if not each]
        for pair in combinations(too_little, 2):
            found += _sufficient(plan, _combined(plan, *pair), judge)
    smallest = next(reversed(list(smaller_batches(plan))), None)
    base = _replanned(plan, smallest) if smallest and not found else None
    if smallest and base:
        for pair in combinations([saver for saver in SAVERS if saver is not smaller_batches], 2):
            options = ((smallest, *changes) for changes in _combined(base, *pair))
            found += _sufficient(plan, options, judge)
    return ranked(found)[:count]


def ranked(found: Iterable[Advice]) -> list[Advice]:
    """Best first."""
    return sorted(found, key=lambda advice: advice.rank)


def _combined(plan: Plan, saver: Saver, *others: Saver) -> Iterator[tuple[Change, ...]]:
    """One change of each saver, each on top of those before it."""
    for change in saver(plan):
        if not others:
            yield (change,)
        elif changed := _replanned(plan, change):
            yield from ((change, *more) for more in _combined(changed, *others))


def _sufficient(
    plan: Plan, options: Iterable[tuple[Change, ...]], judge: Judge | None
) -> list[Advice]:
    """The mildest that suffices of the changes that keep the training, and of the others."""
    found = []
    each = list(options)
    for keeps in (True, False):
        of_kind = (changes for changes in each if all(c.keeps for c in changes) is keeps)
        tried = (_tried(plan, changes, judge) for changes in of_kind)
        best = mildest((advice for advice in tried if advice), lambda advice: advice.forecast)
        found += [best] if best else []
    return found


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
