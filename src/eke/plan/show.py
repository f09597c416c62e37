"""The plan as text: the first screen of a run, and all of `eke plan`."""

import textwrap

from eke.plan.plan import Plan
from eke.units import format_bytes, format_count, format_flops


def render_plan(plan: Plan) -> str:
    """Every decision with its reason, then the size of the job, then warnings."""
    rows = [(d.key, d.value, d.reason) for d in plan.decisions]
    rows += _size_rows(plan)
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    chosen = "  ".join(
        f"{group}={option}"
        for group, option in sorted(plan.choices.items())
        if option != "none" and group not in ("hardware", "sweep", "engine", "distributed")
    )
    options = textwrap.wrap(chosen, 98, initial_indent="  ", subsequent_indent="  ")
    lines = [f"plan {plan.run_id}", *options, ""]
    lines += [f"  {key:<{widths[0]}}  {value:>{widths[1]}}  {why}" for key, value, why in rows]
    lines += [f"  warning: {warning}" for warning in plan.warnings]
    return "\n".join(lines)


def _size_rows(plan: Plan) -> list[tuple[str, str, str]]:
    size, steps = plan.size, plan.steps
    flops = size.flops_per_sample * plan.batch.samples_per_step
    memory = plan.device.memory_bytes
    return [
        ("parameters", format_count(size.num_parameters), f"model={plan.config.model.option}"),
        ("model FLOPs per step", format_flops(flops), size.flops_formula),
        (
            "samples in all",
            format_count(steps.total * plan.batch.samples_per_step),
            f"{steps.total / steps.per_epoch:.2f} epochs of {steps.num_train_samples} samples",
        ),
        (
            "device memory",
            format_bytes(memory) if memory else "unknown",
            "" if plan.device.present else "declared, not present: for planning only",
        ),
    ]
