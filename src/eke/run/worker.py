"""`python -m eke.run.worker RUN_DIR`: the one process that trains, whoever starts it.

It reads plan.json, trains, writes record.json, and leaves by `os._exit`: interpreter teardown of
communication libraries can abort a perfectly good run, so no exit code may come after the record.
"""

import logging
import os
import sys
from pathlib import Path

from eke.errors import EkeError
from eke.paths import RunPaths
from eke.plan import read_plan
from eke.record import EXIT_FAILED, EXIT_USER, metrics, start_attempt
from eke.run.process import resident_bytes
from eke.run.stop import StopFlag, stop_with_supervisor

QUIET = {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""torch's native code, its profiler above all, writes notes that mean nothing to users."""


def main(arguments: list[str]) -> int:
    """Run the plan of one folder; returns the exit code that stands in the record."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m eke.run.worker RUN_DIR\n")
        return EXIT_USER
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr
    )
    for name, level in QUIET.items():
        os.environ.setdefault(name, level)
    stop = StopFlag()
    stop.listen()
    stop_with_supervisor()
    empty = resident_bytes()
    paths = RunPaths(Path(arguments[0]).absolute())
    try:
        plan = read_plan(paths)
        number = start_attempt(paths, plan.machine)
        metrics.seal(paths.metrics)
        # Imports torch: only now, so that signals are heard and the attempt is on disk before that.
        from eke.run.attempt import Attempt, work

        return work(Attempt(plan, paths, number, stop, empty))
    except EkeError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except OSError as error:
        sys.stderr.write(f"the run folder cannot be written: {error}\n")
        return EXIT_FAILED


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
