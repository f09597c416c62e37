"""Worker process, one per rank: `python -m eke.training.loop.worker RUN_DIR`."""

import logging
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from eke.common.errors import ChangedError, EkeError
from eke.common.files import make_private_dir, open_file, terminate_last_line
from eke.common.output import open_streams
from eke.common.paths import RANK, RunPaths
from eke.common.python_runtime import describe_missing_api, importing
from eke.hardware import environment
from eke.plan.own_code import frozen_folder, serve_code
from eke.plan.planner import (
    Plan,
    check_software,
    cut_of,
    outline_record,
    read_plan,
    with_own_software,
)
from eke.plan.record import EXIT_FAILED, Failure, Outcome, metrics, start_attempt, write_record
from eke.training.loop.environment import (
    QUIET,
    choose_compiled_code_folders,
    own_resident_bytes,
    prefer_for_oom_kill,
    quiet_imports,
)
from eke.training.loop.stop import StopFlag, stop_with_supervisor

if TYPE_CHECKING:
    from eke.training.distributed.ranks import Ranks

_PLAN_TIMEOUT_S = 120.0
_PLAN_POLL_S = 0.1


def main(arguments: list[str]) -> int:
    """Run the plan of a folder and return the exit code in the record."""
    paths = RunPaths(Path(arguments[0]).absolute())
    stop = StopFlag()
    stop.listen()
    stop_with_supervisor()
    # Ignore the configuration of `accelerate launch`.
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    empty = own_resident_bytes()
    try:
        rank = int(os.environ.get(RANK, "0"))
        if rank:
            _redirect_output(paths, rank)
        _set_up_output()
        choose_compiled_code_folders()
        return _follow_rank0(paths, stop, empty) if rank else run_rank_0(paths, stop, empty)
    except EkeError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except OSError as error:
        sys.stderr.write(f"the run folder cannot be written: {error}\n")
        return EXIT_FAILED


def run_rank_0(paths: RunPaths, stop: StopFlag, empty: int | None) -> int:
    """Train as the only rank, or as the rank that writes. `empty`: resident bytes at the start."""
    plan = read_plan(paths)
    own = with_own_software(plan)
    number = start_attempt(paths, own.machine, cut_of(plan))
    terminate_last_line(paths.metrics)
    try:
        check_software(plan)
    except ChangedError as error:
        failure = Failure("software", str(error))
        return _record_end(own, paths, number, Outcome.refused, failure)
    serve_code(plan.code, frozen_folder(paths.folder))
    # Import torch only now: signals are handled and the attempt is on disk by then.
    try:
        with importing():
            from eke.training.loop.attempt import Attempt, work
    except (ImportError, AttributeError) as error:
        if not (why := describe_missing_api(error)):
            raise
        return _record_end(plan, paths, number, Outcome.crashed, Failure("import", why))

    ranks = _join_ranks(plan)
    ranks.tell(number)
    return work(Attempt(plan, paths, number, stop, empty, ranks))


def _record_end(
    plan: Plan, paths: RunPaths, attempt: int, outcome: Outcome, failure: Failure
) -> int:
    """Write the record of a run that could not begin, without torch, and return its exit code."""
    rows, _ = metrics.read_rows(paths.metrics)
    record = outline_record(plan, rows, attempt, outcome, failure)
    record.environment = environment()
    write_record(paths, record)
    sys.stderr.write(f"{failure.message}\n")
    return record.exit_code


def _follow_rank0(paths: RunPaths, stop: StopFlag, empty: int | None) -> int:
    """Train as a rank other than 0, when the plan is in the folder and rank 0 has joined."""
    with importing():
        from eke.training.loop.attempt import Attempt, run_follower

    # Under torchrun, rank 0's supervisor may still have to write the plan.
    deadline = time.monotonic() + _PLAN_TIMEOUT_S
    while not paths.plan.exists() and time.monotonic() < deadline:
        time.sleep(_PLAN_POLL_S)
    plan = read_plan(paths)
    serve_code(plan.code, frozen_folder(paths.folder))
    ranks = _join_ranks(plan)
    number = ranks.tell(None)
    return run_follower(Attempt(read_plan(paths), paths, number, stop, empty, ranks))


def _join_ranks(plan: Plan) -> "Ranks":
    """Join the run's other processes, if any. A probe is killed first if memory runs out."""
    from eke.training.distributed.ranks import join_ranks

    if plan.probe:
        prefer_for_oom_kill()
    return join_ranks(plan)


def _redirect_output(paths: RunPaths, rank: int) -> None:
    """Redirect the output of ranks other than 0, including native code, to separate logs."""
    make_private_dir(paths.folder)
    descriptor = open_file(paths.rank_log(rank), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)


def _set_up_output() -> None:
    handler = logging.StreamHandler(sys.stderr)
    form, clock = "%(prefix)s%(asctime)s %(message)s", "%H:%M:%S"
    handler.setFormatter(logging.Formatter(form, clock, defaults={"prefix": ""}))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    quiet_imports()


if __name__ == "__main__":
    open_streams("utf-8")
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # teardown of communication libraries can abort a finished run
