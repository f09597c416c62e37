"""From work and rates to the time of an optimizer step.

Kernels of one device run one after the other, so what limits each adds up; the host launches them
ahead, so that it counts only where it takes longer than the device; what is sent while passes run
is hidden between fully and not at all. Published models of this kind are off by 5 to 15 % once
their rates are measured on the very machine (vTrain, arXiv:2312.12391: 8.4 %); this one knows a
device by its datasheet until runs have calibrated it.
"""

from collections.abc import Mapping

from eke.estimate.time.products import Product
from eke.estimate.time.rates import (
    COLLECTIVE_S,
    DISK,
    HOST_UPDATE_S,
    LAUNCH_S,
    TRAINER_S,
    Rates,
    rates_of,
)
from eke.estimate.time.transfers import goes_through_host
from eke.estimate.time.values import PARTS, Span, StepTime, Unknown, exactly, highest, total
from eke.estimate.time.work import Work, work_of
from eke.plan.planner import Plan

CACHE_RELEASE = Span(0.0, 0.1, 0.2)
"""Share of a step that giving cached memory back takes: transformers' docstring of
`torch_empty_cache_steps` says about 10 %; twice that is an assumption."""


def prior_time(plan: Plan, work: Work | None = None) -> StepTime | Unknown:
    """Time by datasheets and published efficiencies, with no run looked at."""
    rates = rates_of(plan, goes_through_host(plan))
    if rates is None:
        return Unknown(why_unknown(plan))
    work = work or work_of(plan)
    parts, step = _composed(plan, work, rates)
    basis = "datasheet rates and published efficiencies"
    return describe(plan, work, step, parts, basis, rates.peak)


def why_unknown(plan: Plan) -> str:
    """One line: what there is not, and what would give it."""
    if plan.device.kind == "cpu":
        return "processors have no datasheet to go by; five finished runs here would tell"
    what = "compute format" if plan.device.peak_flops else "device"
    return f"no datasheet rates for this {what}; five finished runs on it would tell"


def _composed(plan: Plan, work: Work, rates: Rates) -> tuple[dict[str, float], Span]:
    """Expected seconds of each part, and the step's."""
    products = total([_product_s(each, rates) for each in work.products])
    traffic = work.moved.over(rates.memory)
    device = products + traffic
    host = work.launches.by(LAUNCH_S)
    if plan.config.engine.option == "trainer":
        host = host + TRAINER_S * plan.batch.accumulation
    passes = highest(device, host)
    updated = work.updates.moved.over(rates.memory) + exactly(work.updates.flops).over(
        rates.optimizer
    )
    update_host = exactly(work.updates.launches).by(LAUNCH_S)
    update = highest(updated, update_host)
    busy = passes + update
    sent = exactly(work.moves.exchanged).over(rates.link) + COLLECTIVE_S * work.moves.collectives
    moved = exactly(work.moves.to_host).over(rates.host) + exactly(work.moves.to_disk).over(DISK)
    hosted = HOST_UPDATE_S * work.moves.on_host
    sent_shown, moved_shown = _beside(sent, passes), _beside(moved, passes)
    step = busy + sent_shown + moved_shown + hosted
    if plan.config.memory.empty_cache_every:
        step = step + step.by(CACHE_RELEASE) * (1 / plan.config.memory.empty_cache_every)
    waits = max(0.0, host.expected - device.expected) + max(
        0.0, update_host.expected - updated.expected
    )
    parts = {
        "compute": products.expected,
        "memory": traffic.expected,
        "optimizer": updated.expected,
        "host": waits,
        "transfers": moved_shown.expected + hosted.expected,
        "communication": sent_shown.expected,
    }
    return parts, step


def _beside(sent: Span, passes: Span) -> Span:
    """Time that is seen of what is sent while passes run: hidden fully, half, or not at all."""
    hidden = max(0.0, sent.low - passes.low)
    expected = (max(0.0, sent.expected - passes.expected) + sent.expected) / 2
    return Span(min(hidden, expected), expected, max(expected, sent.high))


def _product_s(product: Product, rates: Rates) -> Span:
    """Seconds: as long as its operands take, or its FLOPs."""
    rate = rates.attention if product.fused else rates.tensor
    if product.kind == "linear" and rates.float8 is not None:
        rate = rates.float8
    return highest(exactly(product.flops).over(rate), exactly(product.moved).over(rates.memory))


def describe(
    plan: Plan,
    work: Work,
    step: Span,
    parts: Mapping[str, float],
    basis: str,
    peak: float | None,
) -> StepTime:
    """All that follows from the time of a step.

    Args:
        plan: of the run.
        work: of one step.
        step: its seconds.
        parts: expected seconds of each.
        basis: what rates are known from.
        peak: FLOP/s of the device by its datasheet; None where there is none.
    """
    devices = plan.batch.world_size * plan.batch.devices
    samples = plan.batch.samples_per_step
    flops, mfu = plan.size.flops_per_sample, None
    if flops and peak:
        needed = flops * samples / plan.batch.world_size
        mfu = step.inverse(needed / (peak * plan.batch.devices))
    whole = step * plan.steps.total
    return StepTime(
        step_s=step,
        samples_per_s=step.inverse(samples),
        tokens_per_s=step.inverse(work.tokens * plan.batch.world_size),
        parts={name: seconds for name, seconds in parts.items() if seconds > 0},
        limit=PARTS[max(parts, key=lambda name: parts[name])],
        mfu=mfu,
        total_s=whole,
        gpu_hours=whole * (devices / 3600),
        num_devices=devices,
        basis=basis,
        notes=work.notes,
    )
