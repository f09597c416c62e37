"""Commands of `train.py`: help, one plan, one run (running.py) or a sweep (sweep.py).

Input: arguments of the command line. Output: exit codes, and printed plans and results. Begin
with `main`. Each other module is one command.
"""

import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TextIO

import eke
from eke.common.errors import ConfigError, EkeError, Fix, Problem, format_os_error
from eke.common.output import output_was_lost, print_problems_json, write_line
from eke.common.paths import program
from eke.common.process_env import (
    RANK_0_ERROR_TIMEOUT_S,
    VERBOSE,
    be_verbose,
    check_started_ranks,
    check_started_tasks,
    is_first,
    leave_tracked_run,
    my_rank,
)
from eke.common.screen import is_quiet
from eke.config.compose import (
    COMPLETION_FLAGS,
    Arguments,
    Composed,
    answer_shell,
    check_info_flag,
    compose,
    is_for_hydra,
    needs_sweep,
    run_hydra_flags,
    split_arguments,
    sweep_by_hydra,
)
from eke.config.schema import unused_cluster_overrides
from eke.plan.record import EXIT_FAILED, EXIT_OK, EXIT_RESUMABLE

ALL_DEVICES = "hardware=all"
"""Override that compares all known devices."""


def main(
    argv: Sequence[str],
    *,
    as_json: bool = False,
    why: bool = False,
    trace: bool = False,
    also: Mapping[str, int] | None = None,
) -> int:
    """Run the command `python train.py` and return its exit code. Errors have no traceback.

    With `plan_only=true`, `as_json` prints JSON, `why` adds changes that make the plan fit, and
    `trace` spends seconds on a trace. `--json` prints the result of a run or sweep as JSON.
    `also`: flag of the calling command -> number of its values.
    """
    as_json = as_json or "--json" in argv
    try:
        arguments = split_arguments([*filter("--json".__ne__, argv)], also)
        if arguments.version:
            return print_once(f"eke {eke.__version__}")
        warn_and_set_loggers(arguments)
        if arguments.hydra_flags:
            return ask_hydra(arguments)
        if why or ALL_DEVICES in arguments.overrides:
            # Lazy: the import takes a quarter of the time of an invalid command.
            from eke.workflows.planning import compare_on_all_devices, require_single_plan

            require_single_plan(arguments, why)
            if ALL_DEVICES in arguments.overrides:
                table = compare_on_all_devices(arguments, as_json_text=as_json, trace=trace)
                return print_once(table)
        if arguments.multirun or needs_sweep(arguments.overrides):
            check_started_ranks("a sweep", 1)
            check_started_tasks("a sweep", 1)
            if is_for_hydra(arguments.overrides):
                from eke.workflows.running import run_for_hydra

                leave_tracked_run()
                sweep_by_hydra(arguments.overrides, arguments.config_dir, run_for_hydra)
                return EXIT_OK
            from eke.workflows.sweep import sweep

            return sweep(arguments, as_json, trace)
        return run(_composed(arguments), as_json, why, trace)
    except EkeError as error:
        command = ["eke", "plan", *argv[:-1]] if also else [*program().split(), *argv]
        return report_error(error, as_json, command)
    except OSError as error:  # for example a full disk
        return report_error(EkeError(format_os_error(error)), as_json)
    except KeyboardInterrupt:
        return report_failure("\ninterrupted; the same command continues", EXIT_RESUMABLE)


def _composed(arguments: Arguments) -> Composed:
    if any(text.startswith("train.resume=") for text in arguments.overrides):
        from eke.workflows.resume import with_run_overrides

        arguments = with_run_overrides(arguments)
    return compose(arguments.overrides, arguments.config_dir, in_sweep=arguments.cell)


def run(composed: Composed, as_json: bool = False, why: bool = False, trace: bool = False) -> int:
    """Plan a run. Without `plan_only=true`, start it or return its record."""
    for text in unused_cluster_overrides(composed.overrides):
        print_once(f"  warning: {text}")
    if pooled := [o.split("=", 1) for o in composed.overrides if o.startswith("launcher.")]:
        reason = "is for the runs of a sweep, but this is a single run"
        command = Fix(remark=f"{program()} -m {shlex.join(composed.overrides)}")
        raise ConfigError([Problem(k, v, reason, command, "needs_sweep") for k, v in pooled])
    if composed.config.plan_only:
        from eke.workflows.auto_batch import BatchSearchBudget
        from eke.workflows.planning import plan_for, plan_text

        plan = plan_for(composed, planning=True, means=BatchSearchBudget(trace=trace))
        return print_once(plan_text(plan, as_json_text=as_json, why=why, trace=trace))
    from eke.workflows.running import run_composed

    return run_composed(composed, as_json)


def ask_hydra(arguments: Arguments) -> int:
    """Print Hydra's answer to its own flags (`--cfg job`) after the overrides are checked."""
    if any(flag in COMPLETION_FLAGS for flag in arguments.hydra_flags):
        return print_once(answer_shell(arguments.overrides).removesuffix("\n"))
    check_info_flag(arguments)
    if not arguments.multirun:
        compose(arguments.overrides, arguments.config_dir)
    return print_once(run_hydra_flags(arguments))


def print_once(text: str, to: TextIO | None = None) -> int:
    """Print a text once for all ranks, and return the exit code of a command that only prints."""
    if is_first():
        write_line(text, to)
    return EXIT_FAILED if output_was_lost() else EXIT_OK


def print_progress(text: str) -> None:
    """Print a text once for all ranks on stderr, unless only results are shown (`-q`)."""
    if is_first() and not is_quiet():
        write_line(text, sys.stderr)


def warn_and_set_loggers(arguments: Arguments) -> None:
    """Print the warnings about a command once for all ranks on stderr, and set loggers."""
    for text in arguments.warnings if is_first() else ():
        write_line(f"warning: {text}", sys.stderr)
    if arguments.verbose:
        os.environ[VERBOSE] = arguments.verbose
        be_verbose()


def report_failure(text: str, code: int) -> int:
    """Print an error once for all ranks, and return the exit code."""
    if my_rank() and code != EXIT_RESUMABLE:
        time.sleep(RANK_0_ERROR_TIMEOUT_S)
    if is_first():
        write_line(text, sys.stderr)
    return code


def report_error(error: EkeError, as_json: bool, typed: Sequence[str] = ()) -> int:
    """Print an error, with `as_json` also as JSON, and return the exit code."""
    if as_json and is_first():
        print_problems_json(error)
    return report_failure(error.screen(sys.stderr, typed), error.exit_code)
