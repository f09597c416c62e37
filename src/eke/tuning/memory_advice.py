"""Advice after out-of-memory: techniques and micro-batches whose forecast fits, mildest first."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, islice

from eke.common.errors import ConfigError
from eke.common.screen import paint, width, wrap
from eke.common.text import align, format_bytes
from eke.config.schema import FSDP, Config, PretrainedModel
from eke.estimate.memory import Forecast, Verdict, known_forecast
from eke.estimate.memory.predict_memory import with_available_bytes
from eke.estimate.memory.render_memory import METHODS, as_record
from eke.estimate.time import StepTime, forecast_time, predicted_step, slowdown
from eke.models.checkpoints.architecture import router_loss
from eke.models.sizes import predicted_frac
from eke.plan.planner import Plan, replan
from eke.plan.record import Outcome, Record
from eke.rules import NOT_BY_SIZE, RuleInputs, check
from eke.rules.techniques import (
    CPU,
    QUARTER_BATCH,
    TECHNIQUES,
    Numerics,
    Published,
    Technique,
    applied,
    precision_slowdown,
)
from eke.tuning.recipe_search import ROOM, combine, first_that_fits_memory

_Techniques = tuple[Technique, ...]

LOW_COST_TECHNIQUES = (
    ("attention=sdpa",),
    ("kernels=sparse_prediction",),
    ("kernels=fused_linear_cross_entropy",),
)
"""Techniques milder than smaller micro-batches. At most one of each group is proposed."""

HIGH_COST_TECHNIQUES = (
    ("memory=checkpointing_selective", "memory=checkpointing"),
    ("precision=bf16", "precision=bf16_pure"),
    ("precision=tf32", "precision=fp32"),
    ("optimizer=adamw_8bit", "optimizer=adafactor"),
    ("distributed=zero2", "distributed=zero3", "distributed=fsdp"),
    ("offload=optimizer_cpu",),
    ("peft=lora", "peft=qlora"),
)
"""Techniques that are tried after smaller micro-batches."""


def techniques_for(plan: Plan, groups: Iterable[tuple[str, ...]]) -> list[_Techniques]:
    """Return the techniques of the table for the plan's device, with all their overrides."""
    count = plan.ranks.num_processes
    # An option of `distributed` sets its own number of processes.
    processes = {"distributed": f" distributed.num_processes={count}"}
    return [
        tuple(
            replace(each, name=each.name + processes.get(each.group, ""))
            for each in map(TECHNIQUES.__getitem__, names)
            if plan.device.kind in each.devices
        )
        for names in groups
    ]


def smaller_batches(plan: Plan) -> _Techniques:
    """Return smaller micro-batches with the same samples per step, the largest first."""
    config, size, found = plan.config, plan.batch.per_device, []
    if router_loss(config) is not None:
        return ()  # the router loss is a mean over each micro-batch
    for part in (n for n in range(size - 1, 0, -1) if size % n == 0):
        name, batch = f"batch.per_device={part}", replace(config.batch, per_device=part)
        if config.batch.target is None:
            count = plan.batch.accumulation * (size // part)
            name, batch = f"{name} batch.accumulation={count}", replace(batch, accumulation=count)
        slower = QUARTER_BATCH.slowdown ** (math.log2(size / part) / 2)
        published = Published(slower, f"4 times smaller: {QUARTER_BATCH.source}")
        edit = partial(replace, batch=batch)
        found.append(
            Technique(name, "activations", published=published, applies=lambda _: True, edit=edit)
        )
    return tuple(found)


def _slowdown_of(technique: Technique, plan: Plan, changed: Config) -> float | None:
    """Return the step time relative to the current one, by published figures, None if unknown."""
    num_matmul = plan.size.num_matmul_parameters
    if technique.name == "kernels=sparse_prediction":
        projection = changed.model.vocab_size * changed.model.hidden_size
        return 1 - (1 - predicted_frac(changed)) * projection / max(projection, num_matmul)
    if technique.group != "precision":
        return technique.slowdown
    relative = (technique.slowdown or 1.0) / precision_slowdown(plan.config)
    # A CPU's 16-bit units may be fast, slow or missing.
    return None if plan.device.kind == CPU and relative != 1.0 else relative


MOST_GPUS, OF_A_MACHINE = 512, 8
"""Most GPUs proposed for a declared device, and its GPUs per node: choices."""


def more_devices(plan: Plan) -> _Techniques:
    """Return FSDP2 on more GPUs, the fewest first, with the same samples per step if possible."""
    config, device, found = plan.config, plan.device, []
    now, samples = plan.ranks, plan.batch.samples_per_step
    most = device.count * now.num_nodes if device.present else MOST_GPUS
    if device.kind != "cuda" or now.zero_stage:
        return ()
    for count in (2**n for n in range(1, most.bit_length()) if 2**n > now.num_processes):
        nodes, batch, is_kept = -(-count // device.count), config.batch, bool(config.batch.target)
        name = f"distributed=fsdp distributed.num_processes={count}"
        name += f" distributed.num_nodes={nodes}" if nodes > 1 else ""
        if not is_kept and samples % count == 0:
            batch, is_kept = replace(batch, per_device=samples // count, accumulation=1), True
            name += f" batch.per_device={samples // count} batch.accumulation=1"
        known = replace(TECHNIQUES["distributed=fsdp"], name=name, applies=lambda _: True)
        edit = partial(replace, distributed=FSDP("fsdp", count, nodes), batch=batch)
        numerics = Numerics.same if is_kept else Numerics.reduced
        found.append(replace(known, numerics=numerics, edit=edit))
    return tuple(found)


@dataclass(frozen=True)
class Advice:
    """One set of overrides that reduces memory."""

    overrides: tuple[str, ...]
    plan: Plan
    """Plan with the overrides."""
    forecast: Forecast
    slowdown: float | None
    """Step time relative to the current one. None if unknown."""
    reasons: tuple[str, ...]
    """Source of each change's slowdown."""
    keeps: bool
    """True if the training is the same except for rounding."""

    @property
    def rank(self) -> tuple[bool, bool, bool, float, int]:
        """Sort key: same training, no adapters of random weights, free memory, cost, brevity."""
        config = self.plan.config
        is_loaded = isinstance(config.model, PretrainedModel)
        learns_little = config.peft.is_on and not is_loaded
        slowdown = 2.0 if self.slowdown is None else self.slowdown  # above all known ones
        tight = self.forecast.verdict is not Verdict.fits
        return not self.keeps, learns_little, tight, slowdown, len(self.overrides)


def advise(plan: Plan, count: int = 5, other_devices: bool = True) -> list[Advice]:
    """Return at most `count` sets of one or two changes with which the peak fits, ranked."""
    if (device := plan.device).present is False:
        plan = replace(plan, device=replace(device, count=max(OF_A_MACHINE, device.count)))
    several = more_devices(plan) if other_devices else ()
    batches = smaller_batches(plan)
    cheap = techniques_for(plan, LOW_COST_TECHNIQUES)
    dear = techniques_for(plan, HIGH_COST_TECHNIQUES)
    axes = [*cheap, batches, *dear]
    alone = [_sufficient_advice(plan, [axis]) for axis in axes]
    fewest = filter(None, (_try_techniques(plan, (each,)) for each in several))
    alone.append(list(islice(fewest, 1)))
    found = [advice for each in alone for advice in each]
    if len(found) < count or not any(advice.keeps for advice in found):
        too_little = [a for a, each in zip([*axes, several], alone, strict=True) if not each]
        for pair in combinations(too_little, 2):
            found += _sufficient_advice(plan, pair)
    if not found:
        for pair in combinations([*cheap, *dear], 2):
            found += _sufficient_advice(plan, (batches[-1:], *pair))
    return sorted(found, key=lambda advice: advice.rank)[:count]


def _sufficient_advice(plan: Plan, axes: Sequence[_Techniques]) -> list[Advice]:
    """Return the mildest sufficient changes that keep the training, and that change it."""
    found = []
    every = combine(axes)
    for keeps in (True, False):
        of_kind = (each for each in every if all(t.keeps_training for t in each) is keeps)
        tried = (_try_techniques(plan, techniques) for techniques in of_kind)
        best = first_that_fits_memory(
            (advice for advice in tried if advice), lambda advice: advice.forecast
        )
        found += [best] if best else []
    return found


def _try_techniques(plan: Plan, techniques: _Techniques) -> Advice | None:
    """Return advice if the techniques apply, rules other than size permit them, and it fits."""
    config = applied(plan.config, techniques)
    if config is None or check(RuleInputs(config, plan.device, planning=True), NOT_BY_SIZE)[0]:
        return None
    try:
        changed = replan(plan, config)
    except ConfigError:
        return None
    found = known_forecast(changed)
    if found.verdict not in ROOM:
        return None
    # The time model's answer, if it has the device. Else published figures, if all are known.
    slower = [_slowdown_of(each, plan, changed.config) for each in techniques]
    known = [each for each in slower if each is not None]
    total = math.prod(known) if len(known) == len(slower) else None
    reasons = tuple(each.reason for each in techniques)
    if (estimated := slowdown(plan, changed)) is not None:
        total, reasons = estimated[0], (estimated[1],)
    return Advice(
        overrides=tuple(text for each in techniques for text in each.overrides),
        plan=changed,
        forecast=found,
        slowdown=total,
        reasons=reasons,
        keeps=all(each.keeps_training for each in techniques),
    )


def render_advice(found: Forecast, advice: list[Advice], sources: bool = False) -> list[str]:
    """Return the overrides with memory and time, equivalent training first."""
    if found.verdict is Verdict.unknown:
        return wrap("The device's memory is unknown. To declare it: hardware=NAME", width())
    if not advice:
        means = "a smaller model, shorter samples (data.seq_len), more devices (distributed=fsdp)"
        means = f"Other means: {means} or a larger device (hardware=all)"
        return wrap(f"No technique and no two techniques reduce memory enough. {means}", width())
    head = "make it fit" if found.verdict is not Verdict.fits else "need less memory"
    names = [" ".join(each.overrides) for each in advice]
    figures = align([*map(_figures, advice)], right=[0])
    most = width() - max(map(len, figures))  # the last column in which figures may begin
    at, lines = min(max(map(len, names)) + 4, most), list[str]()
    for keeps, whose in ((True, "same training"), (False, "another training (compare the loss)")):
        group = [n for n, each in enumerate(advice) if each.keeps is keeps]
        lines += [f"{head}, {whose}:"] if group else []
        for name, figure in ((names[n], figures[n]) for n in group):
            typed = wrap(name, width(), "  ", "    ")
            last = typed.pop() if len(typed) == 1 and len(typed[0]) + 2 <= at else ""
            lines += [paint(line, "green") for line in typed]
            lines.append(f"{paint(last, 'green')}{' ' * (at - len(last))}{figure}")
    reasons = dict.fromkeys(reason for each in advice for reason in each.reasons if sources)
    for reason in reasons:
        lines += wrap(f"source: {reason}", width(), "  ", "    ")
    return lines


def _figures(advice: Advice) -> tuple[str, str, str]:
    """Return memory, method with verdict, and time per step."""
    found = advice.forecast
    remark = f"({METHODS[found.method]}): {found.verdict.value}"
    time = "not known" if advice.slowdown is None else f"{advice.slowdown - 1:+.0%} time"
    if time in ("+0% time", "-0% time"):
        time = "same speed"
    return format_bytes(found.peak.expected), remark, time


_PROPOSALS = 3
"""Number of proposals in a record."""


def advice_for(plan: Plan, seen: int | None = None) -> list[str]:
    """Return overrides for a run that ran out of memory with `seen` bytes, None if unmeasured."""
    found = known_forecast(plan)
    if found.verdict is Verdict.unknown and seen is None:
        return []
    expected, capacity = found.peak.expected, found.capacity or found.peak.expected
    for most in (min(expected, capacity, seen or expected), min(expected, capacity)):
        # A share of 0.85 is further below than the errors of forecasts.
        if advice := advise(with_available_bytes(plan, int(0.85 * most)), _PROPOSALS):
            break
    else:
        advice = advise(plan, _PROPOSALS)
    return [" ".join(each.overrides) for each in advice]


def note_predictions(record: Record, plan: Plan, may_lack: bool = False) -> None:
    """Add predictions to a record and, after an out-of-memory or with `may_lack`, advice."""
    record.memory.predicted = as_record(known_forecast(plan))
    ran_short = may_lack and plan.device.kind == "cpu"
    if ran_short or record.outcome == Outcome.oom.value:
        record.memory.advice = advice_for(plan, memory_seen(plan, record))
    time = forecast_time(plan)
    if isinstance(time, StepTime):
        record.timing.predicted_step_s = predicted_step(time)


def memory_seen(plan: Plan, record: Record) -> int | None:
    """Return the forecast-comparable bytes that a run had at out-of-memory, None if unknown."""
    measured, expected = record.memory.measured, record.memory.predicted
    if measured is None:
        return None
    if plan.device.kind != "cpu":
        context = expected.components.get("context", 0) if expected else 0
        reserved = measured.peak_reserved_bytes
        return reserved + context if reserved else None
    before, peak = measured.stages.get("kernels_loaded"), measured.process_peak_bytes
    if before is None or peak is None or peak <= before:
        return None
    return peak - before
