"""What of a record follows from the plan: the same whether the worker or its supervisor writes."""

from collections.abc import Sequence

from eke.plan.plan import Plan
from eke.plan.store import plan_to_plain
from eke.record import Failure, Outcome, Record, derive, metrics


def outline_record(
    plan: Plan,
    rows: Sequence[metrics.Row],
    attempt: int,
    outcome: Outcome,
    failure: Failure | None,
) -> Record:
    """A record of the plan and of what metrics.jsonl holds; memory and the like are absent yet."""
    content = plan_to_plain(plan)
    config = content.pop("config")
    steps = metrics.latest(rows, metrics.LOSS)
    compute = plan.compute.autocast or ("tf32" if plan.compute.tf32 else "float32")
    return Record(
        run_id=plan.run_id,
        name=plan.name,
        outcome=outcome.value,
        exit_code=outcome.exit_code,
        attempt=attempt,
        steps_done=int(steps[-1][metrics.STEP]) if steps else 0,
        config=config,
        choices=dict(plan.choices),
        overrides=list(plan.overrides),
        plan=content,
        machine=dict(plan.machine),
        environment={},
        command=["python", "train.py", *plan.overrides],
        timing=derive.timing(rows),
        throughput=derive.throughput(
            rows,
            plan.size.flops_per_sample,
            plan.size.flops_formula,
            plan.batch.world_size,
            plan.device.peak(compute),
        ),
        loss=derive.losses(rows),
        warnings=list(plan.warnings),
        failure=failure,
    )
