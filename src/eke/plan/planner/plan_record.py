"""What of a record follows from the plan: the same whether the worker or its supervisor writes."""

from collections.abc import Sequence

from eke.plan.planner.dataloader_hints import waiting_hints
from eke.plan.planner.plan import Plan
from eke.plan.planner.store import plan_to_plain
from eke.plan.record import Failure, Outcome, Record, derive, metrics


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
    timing = derive.timing(rows)
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
        command=plan.command,
        timing=timing,
        throughput=derive.throughput(
            rows,
            plan.size.flops_per_token,
            plan.size.flops_formula,
            plan.batch.world_size * plan.batch.devices,
            plan.device.peak(_format(plan)),
        ),
        loss=derive.losses(rows),
        warnings=[*plan.warnings, *waiting_hints(plan, timing)],
        failure=failure,
    )


def _format(plan: Plan) -> str:
    """The format whose peak the run is measured against."""
    if plan.compute.float8 != "off":
        return "float8"
    tf32 = plan.compute.tf32 and plan.compute.matmul == "float32"
    return "tf32" if tf32 else plan.compute.matmul
