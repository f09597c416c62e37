"""A run on this machine while it runs: from its plan to its record, whoever waits for it."""

import errno
import sys
from collections.abc import Container, Mapping, Sequence
from contextlib import ExitStack

import yaml

from eke.common.errors import RunError
from eke.common.files import write_atomic
from eke.common.paths import RunPaths, user_path
from eke.launch.processes.collect_outcome import settle
from eke.launch.processes.run_dir import Place, claim, find_place
from eke.launch.processes.worker_process import Spot, StartProcess, Worker, spawn
from eke.plan.planner import Plan, plan_to_plain, remove_swap, swap_folder, write_plan
from eke.plan.record import Record, read_attempts


def place_of(plan: Plan, old: Container[str] | None = None) -> Place:
    """Where this run is, or will be; `old` as in `find_place`."""
    return find_place(user_path(plan.config.paths.runs), plan, plan.config.rerun, old=old)


def write_down(paths: RunPaths, plan: Plan) -> None:
    """Write a plan into its folder: for the worker, and its configuration for people.

    Raises:
        OSError: the folder cannot be written.
    """
    write_plan(paths, plan)
    text = yaml.safe_dump(plan_to_plain(plan)["config"], sort_keys=False)
    write_atomic(paths.config, f"# {' '.join(plan.overrides)}\n{text}")


class LiveRun:
    """One attempt at a run, in a claimed folder. `finish` must be called once it is over."""

    def __init__(
        self,
        plan: Plan,
        place: Place,
        num_processes: int,
        environment: Mapping[str, str] | None = None,
        descriptors: Sequence[int] = (),
        spot: Spot | None = None,
        start: StartProcess = spawn,
    ) -> None:
        """Claim the folder, write the plan into it and start the worker.

        Args:
            plan: what is to be done.
            place: where.
            num_processes: to start here.
            environment: variables of the worker's own.
            descriptors: locks that are held as long as the worker lives.
            spot: which machine this is, of a run that has several.
            start: makes the worker's process.

        Raises:
            BusyError: somebody works on this run.
            RunError: the folder cannot be written.
        """
        self.plan, self.place = plan, place
        self._asked, self._given_up = False, False
        self._held = ExitStack()
        try:
            lock = self._held.enter_context(claim(place.paths))
            write_down(place.paths, plan)
            self._attempts_before = len(read_attempts(place.paths))
            locks = [lock, *descriptors]
            self.worker = Worker(place.paths, num_processes, environment, locks, spot, start)
        except BaseException as error:
            self._held.close()
            if isinstance(error, OSError):
                raise _unwritable(place, error) from error
            raise

    @property
    def pid(self) -> int:
        """Its worker's process, or the one that has started all others."""
        return self.worker.process.pid

    def is_over(self) -> bool:
        """Whether its worker has ended."""
        return self.worker.is_over()

    def ask(self, number: int) -> None:
        """Hand a signal on: it saves a checkpoint and stops."""
        self._asked = True
        self.worker.ask(number)

    def kill(self) -> None:
        """End all its processes at once; where it was asked before, somebody would not wait."""
        self._given_up = self._asked and not self.is_over()
        self.worker.kill()

    def finish(self) -> Record:
        """The record of this attempt; ends the worker if it still runs, and frees the folder.

        Raises:
            RunError: the folder cannot be written.
        """
        try:
            code = self.worker.finish()
            remove_swap(swap_folder(self.plan, self.place.paths))  # what a killed worker has left
            paths, before = self.place.paths, self._attempts_before
            return settle(paths, self.plan, code, before, self._given_up)
        except OSError as error:
            raise _unwritable(self.place, error) from error
        finally:
            self._held.close()


def _unwritable(place: Place, error: OSError) -> RunError:
    if error.errno in (errno.ENOMEM, errno.EAGAIN):
        return RunError(f"the machine has no room for another process: {error.strerror}")
    if error.filename == sys.executable:  # as subprocess says it
        why = error.strerror or error
        return RunError(f"{sys.executable}, which runs eke, cannot be executed any more: {why}")
    return RunError(f"{place.paths.folder} cannot be written: {error.strerror or error}")
