"""The plan as text: the first screen of a run, and all of `eke plan`."""

import textwrap

from eke.common.text_table import align
from eke.common.units import format_bytes, format_count, format_flops
from eke.config.schema import PretrainedModel
from eke.plan.planner.plan import Plan


def render_plan(plan: Plan) -> str:
    """Every decision with its reason, then the size of the job, then warnings."""
    rows = [(d.key, d.value, d.reason) for d in plan.decisions]
    rows += _size_rows(plan)
    chosen = "  ".join(
        f"{group}={option}"
        for group, option in sorted(plan.choices.items())
        if option not in ("none", "loop") and group not in ("hardware", "sweep", "distributed")
    )
    options = textwrap.wrap(chosen, 98, initial_indent="  ", subsequent_indent="  ")
    lines = [f"plan {plan.run_id}", *options, ""]
    lines += [f"  {line}" for line in align(rows, right=[1])]
    lines += [f"  warning: {warning}" for warning in plan.warnings]
    return "\n".join(lines)


def _of_device_memory(plan: Plan) -> str:
    """What else is to be known of it."""
    if not plan.device.present:
        return "declared, not present: for planning only"
    left = plan.device.available_bytes
    return "" if left is None else f"{format_bytes(left)} of it free now"


def _which_model(plan: Plan) -> str:
    """What was chosen, the checkpoint behind it, and how much of it a token sees."""
    words = f"model={plan.config.model.option}"
    if isinstance(plan.config.model, PretrainedModel):
        words += f" {plan.config.model.name_or_path}"
    if plan.size.num_active_parameters != plan.size.num_parameters:
        words += f", {format_count(plan.size.num_active_parameters)} active per token"
    return words


def _trained_row(plan: Plan) -> list[tuple[str, str, str]]:
    """How many numbers are trained, where that is not all of them."""
    count, option = plan.size.num_trained_parameters, plan.config.peft.option
    if option == "none":
        return []
    if count is None:
        return [("trained parameters", "unknown", f"peft={option}; the built model tells")]
    share = f"{count / plan.size.num_parameters:.2%} as many as the model has, by peft={option}"
    return [("trained parameters", format_count(count), share)]


def _size_rows(plan: Plan) -> list[tuple[str, str, str]]:
    size, steps = plan.size, plan.steps
    flops = size.flops_per_sample
    step = "unknown" if flops is None else format_flops(flops * plan.batch.samples_per_step)
    memory = plan.device.memory_bytes
    # The last step of an epoch has what is left of it.
    epochs, more = divmod(steps.total, steps.per_epoch)
    left = min(more * plan.batch.samples_per_step, steps.num_train_samples)
    num_samples = epochs * steps.num_train_samples + left
    return [
        ("parameters", format_count(size.num_parameters), _which_model(plan)),
        *_trained_row(plan),
        ("model FLOPs per step", step, size.flops_formula),
        (
            "samples in all",
            format_count(num_samples),
            f"{num_samples / steps.num_train_samples:.2f} epochs of "
            f"{steps.num_train_samples} samples",
        ),
        (
            "device memory",
            format_bytes(memory) if memory else "unknown",
            _of_device_memory(plan),
        ),
    ]
