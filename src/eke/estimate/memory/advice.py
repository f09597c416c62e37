"""What would make a run fit: each proposal checked by the rules and by its own forecast.

What makes a run need less memory: overrides, what they do to a configuration, what they cost.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations
from math import prod

from eke.common.errors import ConfigError
from eke.common.published_slowdowns import (
    ADAFACTOR,
    ADAM_8BIT,
    CHECKPOINTING,
    FP16,
    LORA,
    QUARTER_BATCH,
    SELECTIVE,
    TF32,
    Published,
)
from eke.config.schema import (
    FSDP,
    Adafactor,
    AdamW,
    AdamW8bit,
    Backend,
    Checkpointing,
    Compute,
    Config,
    Distributed,
    Lora,
    MaskedLM,
    Optimizer,
    PretrainedModel,
    QLora,
    Switch,
    Weights,
)
from eke.estimate.memory.components import Forecast, Verdict
from eke.estimate.memory.predict_memory import known_forecast
from eke.models.sizes import STAGE, describe, predicted_frac
from eke.plan.planner import Plan, replan
from eke.rules import NOT_BY_SIZE, Facts, check


@dataclass(frozen=True)
class Change:
    """One way to need less."""

    overrides: tuple[str, ...]
    config: Config
    """With the overrides."""
    slowdown: float | None
    """Time of a step over what it is now; None where it depends on the machine alone."""
    reason: str
    """Where the slowdown is known from, in one clause."""
    keeps: bool = True
    """The training computes the same, but for rounding."""


def smaller_batches(plan: Plan) -> Iterator[Change]:
    """The same samples per step in smaller pieces, the largest first."""
    config, size = plan.config, plan.batch.per_device
    for part in range(size - 1, 0, -1):
        if size % part:
            continue
        typed = [f"batch.per_device={part}"]
        batch = replace(config.batch, per_device=part)
        if config.batch.target is None:
            count = plan.batch.accumulation * (size // part)
            typed.append(f"batch.accumulation={count}")
            batch = replace(batch, accumulation=count)
        slowdown = QUARTER_BATCH.slowdown ** (math.log2(size / part) / 2)
        reason = f"4 times smaller: {QUARTER_BATCH.source}"
        yield Change(tuple(typed), replace(config, batch=batch), slowdown, reason)


def checkpointing(plan: Plan) -> Iterator[Change]:
    """Recompute what is cheap, then all."""
    config = plan.config
    order = {
        Checkpointing.selective: ("checkpointing_selective", SELECTIVE, ""),
        Checkpointing.full: ("checkpointing", CHECKPOINTING, "the forward pass again, "),
    }
    for kind, (option, published, what) in order.items():
        now = config.memory.checkpointing
        if now is kind or now is Checkpointing.full:
            continue
        memory = replace(config.memory, option=option, checkpointing=kind)
        changed = replace(config, memory=memory)
        yield Change((f"memory={option}",), changed, published.slowdown, what + published.source)


def narrower(plan: Plan) -> Iterator[Change]:
    """16-bit operands, then 16-bit weights, too."""
    config, on_cpu = plan.config, plan.device.kind == "cpu"
    if config.precision.weights is not Weights.float32 or config.precision.float8.value != "off":
        return
    slowdown = None if on_cpu else FP16.slowdown
    reason = f"on tensor cores: {FP16.source}"
    if on_cpu:
        reason = "depends on the processor's units for 16 bits"
    if config.precision.compute is Compute.float32:
        half = replace(config.precision, option="bf16", compute=Compute.bfloat16, tf32=Switch.auto)
        yield Change(("precision=bf16",), replace(config, precision=half), slowdown, reason)
    pure = replace(
        config.precision,
        option="bf16_pure",
        compute=Compute.bfloat16,
        weights=Weights.bfloat16,
        tf32=Switch.auto,  # the presets leave it to the plan, where fp32 switches it off
    )
    already = config.precision.compute is not Compute.float32
    speed = (1.0, "as fast, and updates are rounded") if already else (slowdown, reason)
    yield Change(("precision=bf16_pure",), replace(config, precision=pure), *speed, keeps=False)


def without_copies(plan: Plan) -> Iterator[Change]:
    """Products of the float32 weights themselves: autocast's copies of them may be what is large.

    Of weights that nobody trains they stay for the whole step.
    """
    config, on_cpu = plan.config, plan.device.kind == "cpu"
    now = config.precision
    narrow = now.compute in (Compute.bfloat16, Compute.float16)
    if not narrow or now.weights is not Weights.float32 or now.float8.value != "off":
        return
    precision = replace(now, compute=Compute.float32, tf32=Switch.off)
    if not on_cpu:
        tensor_cores = replace(precision, option="tf32", tf32=Switch.on)
        relative = TF32.slowdown / FP16.slowdown
        changed = replace(config, precision=tensor_cores)
        yield Change(("precision=tf32",), changed, relative, f"on tensor cores: {TF32.source}")
    slowdown = None if on_cpu else 1 / FP16.slowdown
    reason = f"without tensor cores: {FP16.source}"
    if on_cpu:
        reason = "depends on the processor's units for 16 bits"
    changed = replace(config, precision=replace(precision, option="fp32"))
    yield Change(("precision=fp32",), changed, slowdown, reason)


def smaller_states(plan: Plan) -> Iterator[Change]:
    """Moments in 8 bits, or factors of them."""
    config = plan.config
    if type(config.optimizer) is not AdamW:
        return
    if config.memory.optimizer_in_backward or describe(config.optimizer).rounds_at_random:
        return
    smaller: tuple[tuple[Optimizer, Published], ...] = (
        (AdamW8bit(option="adamw_8bit"), ADAM_8BIT),
        (Adafactor(option="adafactor"), ADAFACTOR),
    )
    for optimizer, published in smaller:
        changed = replace(config, optimizer=optimizer)
        overrides = (f"optimizer={optimizer.option}",)
        yield Change(overrides, changed, published.slowdown, published.source, keeps=False)


def sparse_prediction(plan: Plan) -> Iterator[Change]:
    """No logits where nothing is to be predicted."""
    config, size = plan.config, plan.size
    if not isinstance(config.task, MaskedLM) or config.kernels.option != "none":
        return
    kernels = replace(config.kernels, option="sparse_prediction", sparse_prediction=True)
    changed = replace(config, kernels=kernels)
    projection = config.model.vocab_size * config.model.hidden_size
    left_out = 1 - predicted_frac(changed)
    slowdown = 1 - left_out * projection / max(projection, size.num_matmul_parameters)
    reason = f"{left_out:.0%} of the positions have no label, and are not projected"
    yield Change(("kernels=sparse_prediction",), changed, slowdown, reason)


def fused_loss(plan: Plan) -> Iterator[Change]:
    """Never all logits at once."""
    config, size = plan.config, plan.size
    if config.kernels.fused_linear_cross_entropy or config.kernels.option != "none":
        return
    again = config.model.vocab_size * config.model.hidden_size
    narrow = plan.compute.matmul != "float32"
    slowdown = 1 + narrow * again / max(1, 3 * size.num_matmul_parameters)
    kernels = replace(
        config.kernels, option="fused_linear_cross_entropy", fused_linear_cross_entropy=True
    )
    reason = "in 16 bits the vocabulary's projection once more; else nothing"
    overrides = ("kernels=fused_linear_cross_entropy",)
    yield Change(overrides, replace(config, kernels=kernels), slowdown, reason)


def fused_attention(plan: Plan) -> Iterator[Change]:
    """Never all scores at once."""
    config = plan.config
    if config.attention.option != "eager":
        return
    attention = replace(config.attention, option="sdpa", backend=Backend.auto)
    reason = "never slower: arXiv:2205.14135, section 4"
    yield Change(("attention=sdpa",), replace(config, attention=attention), 1.0, reason)


def adapters(plan: Plan) -> Iterator[Change]:
    """Train added matrices alone; then keep the others in 4 bits."""
    config = plan.config
    if config.peft.option == "none":
        changed = replace(config, peft=Lora(option="lora"))
        yield Change(("peft=lora",), changed, LORA.slowdown, LORA.source, keeps=False)
    if config.peft.option in ("none", "lora"):
        kept = {field.name: getattr(config.peft, field.name) for field in fields(config.peft)}
        changed = replace(config, peft=QLora(**(kept | {"option": "qlora"})))
        why = "each layer is unpacked when it is used: arXiv:2305.14314, section 3"
        yield Change(("peft=qlora",), changed, None, why, keeps=False)


def sharing(plan: Plan) -> Iterator[Change]:
    """Share the state out between the processes that there are."""
    config, count = plan.config, plan.config.distributed.num_processes
    if config.distributed.option not in ("ddp", "zero1", "zero2") or count < 2:
        return
    reason = "depends on the links between devices: arXiv:1910.02054, section 7"
    processes = f"distributed.num_processes={count}"
    for option in ("zero2", "zero3"):
        if STAGE.get(config.distributed.option, 0) >= STAGE[option]:
            continue
        shared = replace(config, distributed=replace(config.distributed, option=option))
        yield Change((f"distributed={option}", processes), shared, None, reason)
    kept = {f.name: getattr(config.distributed, f.name) for f in fields(Distributed)}
    fsdp = FSDP(**(kept | {"option": "fsdp", "deepspeed_config": None}))
    yield Change(("distributed=fsdp", processes), replace(config, distributed=fsdp), None, reason)


def offloading(plan: Plan) -> Iterator[Change]:
    """Optimizer states in host memory."""
    config = plan.config
    if config.distributed.option not in ("zero2", "zero3") or config.offload.option != "none":
        return
    if plan.device.kind == "cpu":
        return
    offload = replace(config.offload, option="optimizer_cpu")
    reason = "depends on the host and on the way to it: arXiv:2101.06840, section 6"
    yield Change(("offload=optimizer_cpu",), replace(config, offload=offload), None, reason)


Saver = Callable[[Plan], Iterator[Change]]

SAVERS: tuple[Saver, ...] = (
    fused_attention,
    sparse_prediction,
    fused_loss,
    smaller_batches,
    checkpointing,
    narrower,
    without_copies,
    smaller_states,
    sharing,
    offloading,
    adapters,
)
"""Milder changes first; of each saver at most one change is proposed."""


Judge = Callable[[Plan, Plan], tuple[float, str] | None]
"""A time model: of a plan and a changed one, how much longer a sample takes, and where that is
known from; None where it does not know the device. `eke.estimate.time`, above this package, has
one."""

UNKNOWN_SLOWDOWN = 2.0
"""Rank of a change whose cost depends on the machine: behind all that are known."""

ROOM = (Verdict.fits, Verdict.tight)
"""What is proposed: the expected peak has room."""


@dataclass(frozen=True)
class Advice:
    """One set of overrides that makes room."""

    overrides: tuple[str, ...]
    plan: Plan
    """With them."""
    forecast: Forecast
    """Of that plan, corrected by finished runs where there are enough."""
    slowdown: float | None
    """Time of a step over what it is now; None where it is not known."""
    reasons: tuple[str, ...]
    """Where the slowdown of each change is known from."""
    keeps: bool
    """The training computes the same, but for rounding."""

    @property
    def rank(self) -> tuple[bool, bool, bool, float, int]:
        """The same training first, then what has room to spare, is cheap and is short to type.

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
    """Overrides with which the plan's expected peak has room, as they are ranked.

    Single changes, and pairs of changes of which neither is enough alone; where none of them is,
    pairs with the smallest micro-batch.

    Args:
        plan: what does not fit, or only just.
        count: proposals at most.
        judge: knows what changes cost on this device; the published figures of each do without.
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
    """Of any two savers the first changes that are enough together."""
    return [
        advice
        for one, other in combinations(savers, 2)
        for advice in _mildest(plan, _each_pair(plan, one, other), judge)
    ]


def _pairs_of_the_smallest(plan: Plan, judge: Judge | None) -> list[Advice]:
    """Of any two savers the first changes that are enough with the smallest micro-batch."""
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
    """Of options that keep the training, and of the others, the first with room to spare.

    Where none has it, the first that is tight.
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
    """The plan with a change; None where a rule refuses it, of those that do not count bytes."""
    refused, _ = check(Facts(change.config, plan.device, planning=True), NOT_BY_SIZE)
    if refused:
        return None
    try:
        return replan(plan, change.config)
    except ConfigError:
        return None


def _tried(plan: Plan, changes: tuple[Change, ...], judge: Judge | None) -> Advice | None:
    """Advice where the last of the changes, which holds them all, has room."""
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
