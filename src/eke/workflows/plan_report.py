"""Memory report of a plan: forecast, advice, and a comparison of all known devices."""

import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from eke.common.errors import ConfigError, Fix, Problem
from eke.config.compose import Arguments, compose
from eke.estimate.memory import (
    Forecast,
    as_json,
    compare_devices,
    is_open,
    known_forecast,
    render_devices,
    render_forecast,
    traced_forecast,
    traced_forecasts,
)
from eke.estimate.time import forecast_time, num_runs, render_time, speed_cell
from eke.estimate.time import step_time_json as time_as_json
from eke.hardware import DEVICES, usable_cores
from eke.plan.planner import Plan, plan_to_plain, render_plan, samples_to_keep
from eke.results.report import PlanningLine
from eke.tuning.advice import Advice, advise, ranked, render_advice
from eke.tuning.chooser import ROOM
from eke.workflows import ALL_DEVICES
from eke.workflows.planning import plan_on


def plan_text(
    plan: Plan, *, as_json_text: bool = False, why: bool = False, trace: bool = False
) -> str:
    """All there is to say of a plan that is not to be run.

    For machines under the record's field paths; `why`: also what dominates its memory, and what
    would make it fit; `trace`: spend seconds on a trace where none is kept.
    """
    found = traced_forecast(plan) if trace else known_forecast(plan)
    time = forecast_time(plan)
    advice = composed_advice(plan, trace) if why else []
    if as_json_text:
        content = plan_to_plain(plan) | {"memory": as_json(found)} | time_as_json(time)
        if why:
            content["memory"]["advice"] = [" ".join(each.overrides) for each in advice]
        return json.dumps(content, indent=2)
    parts = [render_plan(plan), render_forecast(plan, found), render_time(time, plan.device.kind)]
    if why:
        parts.append(render_advice(found, advice))
    return "\n\n".join(parts)


def composed_advice(plan: Plan, trace: bool = False) -> list[Advice]:
    """Advice whose overrides compose with the given ones."""
    found = [each for each in advise(plan) if composes(plan.overrides, each.overrides)]
    if not trace:
        return found
    seen = [
        replace(each, forecast=traced_forecast(each.plan)) if is_open(each.forecast) else each
        for each in found
    ]
    return ranked(each for each in seen if each.forecast.verdict in ROOM)


def known_forecasts(plans: Mapping[str, Plan], trace: bool) -> dict[str, Forecast]:
    """Memory forecast of each plan."""
    found = {name: known_forecast(plan) for name, plan in plans.items()}
    if unsure := [name for name, each in found.items() if trace and is_open(each)]:
        line = PlanningLine()
        asked = [plans[name] for name in unsure]
        traced = traced_forecasts(asked, line.traced, processes=usable_cores())
        line.close()
        found |= dict(zip(unsure, traced, strict=True))
    return found


def composes(typed: Sequence[str], more: Sequence[str]) -> bool:
    """Whether overrides can replace, or follow, the given ones."""
    keys = {text.partition("=")[0] for text in more}
    kept = [text for text in typed if text.lstrip("+").partition("=")[0] not in keys]
    with suppress(ConfigError):
        compose([*kept, *more])
        return True
    return False


def refuse_why_of_many(arguments: Arguments, why: bool) -> None:
    """Raise ConfigError if `--why`, which is about one plan, is given for several."""
    if why and (arguments.multirun or ALL_DEVICES in arguments.overrides):
        many = "-m" if arguments.multirun else ALL_DEVICES
        text = f"explains one configuration on one device, and {many} names several"
        typed = [each for each in arguments.overrides if each != "plan_only=true"]
        several = ["-m"] if arguments.multirun else []
        fix = shlex.join(["eke", "plan", *several, *typed])
        raise ConfigError(
            Problem("--why", "", text, Fix(remark=f"{fix}   (or --why with one of them)"))
        )


def compare_on_all_devices(
    arguments: Arguments, *, as_json_text: bool = False, trace: bool = False
) -> str:
    """One line for each device of the table.

    Raises:
        ConfigError: the configuration is wrong, whatever the device, or something would be run, or
            several configurations are named.
    """
    typed = [text for text in arguments.overrides if text != ALL_DEVICES]
    if arguments.multirun:
        why = "compares devices for one configuration, and -m has many"
        raise ConfigError(Problem("hardware", "all", why, Fix("hardware=h100")))
    if "plan_only=true" not in typed:
        why = "compares the known devices, which is planning, and nothing can run on all of them"
        fix = Fix("plan_only=true", remark="or hardware=auto")
        raise ConfigError(Problem("hardware", "all", why, fix))
    composed = compose(typed, arguments.config_dir)
    plans: dict[str, Plan] = {}
    refused: dict[str, tuple[int | None, str]] = {}
    for option, device in DEVICES.items():
        config = replace(composed.config, hardware=replace(composed.config.hardware, option=option))
        one = replace(composed, config=config, choices=composed.choices | {"hardware": option})
        try:
            plans[option] = plan_on(one, device, f"declared by hardware={option}", planning=True)
        except ConfigError as error:
            refused[option] = (device.memory_bytes, error.short())
    if not plans:
        raise ConfigError(Problem("hardware", "all", next(iter(refused.values()))[1]))
    times = {option: forecast_time(plan) for option, plan in plans.items()}
    speeds = {option: (speed_cell(found), num_runs(found)) for option, found in times.items()}
    rows = compare_devices(plans, known_forecasts(plans, trace), refused, speeds)
    if as_json_text:
        content = [
            {
                "hardware": row.option, "memory_bytes": row.memory_bytes,
                "memory": as_json(row.forecast) if row.forecast else None,
                **(time_as_json(times[row.option]) if row.option in times else {}),
                "largest_micro_batch": row.batch, "per_device": row.per_device or None,
                "refused": row.reason,
            }
            for row in rows
        ]  # fmt: skip
        return json.dumps(content, indent=2)
    config = composed.config
    count = config.distributed.num_processes
    return render_devices(rows, config.batch.per_device, samples_to_keep(config), count)
