"""The whole flow, and the only file that knows it: compose, check, plan, launch, record, report."""

import json
import sys
from collections.abc import Sequence

import eke
from eke.check import Facts, check
from eke.compose import Arguments, Composed, compose, help_text, split_arguments
from eke.errors import ConfigError, EkeError
from eke.hardware import choose
from eke.launch import place_of, run_single
from eke.plan import Plan, make_plan, plan_to_plain, render_plan
from eke.record import EXIT_OK
from eke.report import render_summary


def main(argv: Sequence[str]) -> int:
    """Everything behind `python train.py`; returns the exit code and shows no user a traceback."""
    try:
        arguments = split_arguments(argv)
        if arguments.help:
            return say(help_text())
        if arguments.version:
            return say(f"eke {eke.__version__}")
        composed = compose(arguments.overrides, arguments.config_dir)
        return run(composed, arguments)
    except EkeError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code


def plan_for(composed: Composed, planning: bool) -> Plan:
    """Check and plan one configuration.

    Raises:
        ConfigError: every rule it breaks.
    """
    device, reason = choose(composed.config.hardware.option)
    refused, warned = check(Facts(composed.config, device, planning))
    if refused:
        raise ConfigError(refused)
    warnings = [f"{p.path} = {p.value}: {p.why} ({p.fix})" for p in warned]
    return make_plan(
        composed.config, composed.choices, composed.overrides, device, reason, warnings
    )


def run(composed: Composed, arguments: Arguments) -> int:
    """Plan, and unless only the plan is wanted, run it or answer from its record."""
    config = composed.config
    plan = plan_for(composed, planning=config.plan_only)
    if config.plan_only:
        return say(render_plan(plan))
    place = place_of(plan)
    if place.record is not None:
        say(render_summary(place.record, str(place.paths.folder)))
        say(f"  {place.note}")
        return place.record.exit_code
    say(render_plan(plan))
    if place.note:
        say(f"  {place.note}")
    say("")
    sys.stdout.flush()
    record = run_single(plan, place)
    say("\n" + render_summary(record, str(place.paths.folder)))
    return record.exit_code


def plan_json(plan: Plan) -> str:
    """The plan for machines."""
    return json.dumps(plan_to_plain(plan), indent=2)


def say(text: str) -> int:
    """Print for the user; returns the exit code of having said it."""
    sys.stdout.write(text + "\n")
    return EXIT_OK
