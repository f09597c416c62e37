"""What planning shows of memory: the forecast, what would make it fit, and every known device."""

import json
from collections.abc import Sequence
from dataclasses import replace

from eke.app.planning import plan_on
from eke.compose import Arguments, Composed, compose
from eke.errors import ConfigError, Problem
from eke.forecast import (
    Advice,
    advise,
    as_json,
    compare_devices,
    known_forecast,
    render_advice,
    render_devices,
    render_forecast,
    traced_forecast,
)
from eke.hardware import DEVICES
from eke.plan import Plan, plan_to_plain, render_plan, samples_to_keep
from eke.schema import Hardware

ALL = "hardware=all"


def plan_text(
    plan: Plan, *, as_json_text: bool = False, why: bool = False, trace: bool = False
) -> str:
    """All there is to say of a plan that is not to be run.

    Args:
        plan: as made.
        as_json_text: for machines, under the record's field paths.
        why: also what dominates its memory, and what would make it fit.
        trace: spend seconds on a trace where none is kept.
    """
    found = traced_forecast(plan) if trace else known_forecast(plan)
    advice = composed_advice(plan) if why else []
    if as_json_text:
        content = plan_to_plain(plan) | {"memory": as_json(found)}
        if why:
            content["memory"]["advice"] = [" ".join(each.overrides) for each in advice]
        return json.dumps(content, indent=2)
    parts = [render_plan(plan), render_forecast(plan, found)]
    if why:
        parts.append(render_advice(plan, found, advice))
    return "\n\n".join(parts)


def composed_advice(plan: Plan) -> list[Advice]:
    """Advice whose overrides were really composed with those that were typed."""
    return [each for each in advise(plan) if composes(plan.overrides, each.overrides)]


def composes(typed: Sequence[str], more: Sequence[str]) -> bool:
    """Whether overrides can be typed in place of, or behind, those that were."""
    keys = {text.partition("=")[0] for text in more}
    kept = [text for text in typed if text.lstrip("+").partition("=")[0] not in keys]
    try:
        compose([*kept, *more])
    except ConfigError:
        return False
    return True


def asks_for_all_devices(arguments: Arguments) -> bool:
    """Whether one configuration is to be compared on every known device.

    Raises:
        ConfigError: it is, and something would be run, or several configurations are named.
    """
    if ALL not in arguments.overrides:
        return False
    typed = [text for text in arguments.overrides if text != ALL]
    if arguments.multirun:
        why = "compares devices for one configuration, and -m has many"
        raise ConfigError(Problem("hardware", "all", why, "hardware=h100"))
    if "plan_only=true" not in typed:
        why = "compares the known devices, which is planning, and nothing can run on all of them"
        raise ConfigError(Problem("hardware", "all", why, "plan_only=true   (or hardware=auto)"))
    return True


def compare_on_all_devices(arguments: Arguments, *, as_json_text: bool = False) -> str:
    """One line for each device of the table.

    Raises:
        ConfigError: the configuration is wrong, whatever the device.
    """
    typed = [text for text in arguments.overrides if text != ALL]
    composed = compose(typed, arguments.config_dir)
    plans: dict[str, Plan] = {}
    refused: dict[str, tuple[str, int | None, str]] = {}
    for option, device in DEVICES.items():
        config = replace(composed.config, hardware=Hardware(option=option))
        one = Composed(config, composed.choices | {"hardware": option}, composed.overrides)
        try:
            plans[option] = plan_on(one, device, f"declared by hardware={option}", planning=True)
        except ConfigError as error:
            refused[option] = (device.name, device.memory_bytes, error.short())
    if not plans:
        raise ConfigError(Problem("hardware", "all", next(iter(refused.values()))[2]))
    rows = compare_devices(plans, refused)
    if as_json_text:
        content = [
            {
                "hardware": row.option,
                "memory_bytes": row.memory_bytes,
                "memory": as_json(row.forecast) if row.forecast else None,
                "largest_micro_batch": row.batch,
                "per_device": row.per_device or None,
                "refused": row.reason,
            }
            for row in rows
        ]
        return json.dumps(content, indent=2)
    config = composed.config
    return render_devices(rows, config.batch.per_device, samples_to_keep(config))
