"""How the samples of one optimizer step are cut into micro-batches."""

from dataclasses import replace

from eke.config.schema import DEFAULT_PER_DEVICE, Config
from eke.plan.planner.plan import BatchPlan, Decision


def samples_to_keep(config: Config) -> int:
    """Samples per optimizer step that batch=auto keeps: `batch.target`, else those of batch=fixed.

    Args:
        config: whose micro-batch may still be open.
    """
    return config.batch.target or DEFAULT_PER_DEVICE * config.distributed.num_processes


def possible_batches(config: Config) -> list[Config]:
    """The configuration with each micro-batch that keeps its samples per step, the smallest first.

    Args:
        config: with an open micro-batch; its samples per step are a multiple of its processes.
    """
    target = samples_to_keep(config)
    each = target // config.distributed.num_processes
    small = [size for size in range(1, int(each**0.5) + 1) if each % size == 0]
    sizes = sorted({*small, *(each // size for size in small)})
    batch = replace(config.batch, option="fixed", target=target)
    return [replace(config, batch=replace(batch, per_device=size)) for size in sizes]


def plan_batch(config: Config, decisions: list[Decision]) -> BatchPlan:
    """Micro-batches of the configuration; of one sample as long as batch=auto has not chosen.

    Args:
        config: checked.
        decisions: what is derived is added to them.
    """
    batch, count = config.batch, config.distributed.num_processes
    alone = config.distributed.option == "dp"  # one process, and all devices are its own
    unit = "devices" if alone else "processes"
    accumulation = batch.accumulation or 1
    if batch.target is not None or batch.per_device is None:
        target = samples_to_keep(config)
        accumulation = target // (batch.micro_batch * count)
        reason = f"batch.target {target} / ({batch.micro_batch} x {count} {unit})"
        decisions.append(Decision("batch.accumulation", str(accumulation), reason))
    plan = BatchPlan(
        per_device=batch.micro_batch,
        accumulation=accumulation,
        world_size=1 if alone else count,
        eval_per_device=batch.eval_per_device or batch.micro_batch,
        devices=count if alone else 1,
    )
    reason = f"{batch.micro_batch} per device x {accumulation} accumulated x {count} {unit}"
    decisions.append(Decision("samples per step", str(plan.samples_per_step), reason))
    return plan


def smaller_batch(config: Config, batch: BatchPlan, num_samples: int) -> str:
    """The largest batch of which there is a whole one."""
    count = batch.world_size * batch.devices
    unit = batch.per_device * count
    if unit <= num_samples:
        key = "target" if config.batch.target is not None else "accumulation"
        pieces = num_samples // unit
        return f"batch.{key}={pieces * unit if key == 'target' else pieces}"
    fixes = [f"batch.per_device={max(1, num_samples // count)}"]
    fixes += [
        f"batch.{key}=null"
        for key in ("accumulation", "target")
        if getattr(config.batch, key) is not None
    ]
    return " ".join(fixes)
