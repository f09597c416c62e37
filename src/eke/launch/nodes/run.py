"""A run whose first machine is this one, alone or with others."""

import time

from eke.common.files import own_folder
from eke.launch.nodes.leader import Head
from eke.launch.processes.run_dir import Place
from eke.launch.processes.running_run import LiveRun
from eke.launch.processes.worker_process import Spot
from eke.plan.planner import Plan
from eke.plan.record import Outcome, Record, write_record

LEFT_BEHIND_S = 30.0
"""How long processes here may go on when those of another machine are gone: gloo says so at once,
and what waits for NCCL would wait for `distributed.timeout_s`."""


class LedRun:
    """One attempt at a run on several machines, in a claimed folder; see LiveRun."""

    def __init__(self, plan: Plan, place: Place, head: Head) -> None:
        """Wait for the other machines, claim the folder and have all of them start.

        Raises:
            BusyError: somebody works on this run.
            EkeError: machines are missing, or the folder cannot be written.
        """
        self.plan, self.place, self._head = plan, place, head
        self._left_behind: float | None = None
        self._killed_for = ""
        head.gather(plan.config.distributed.timeout_s)
        own_folder(place.paths.folder)
        self._endpoint = head.begin(place.paths.folder, plan.processes_per_node)
        spot = Spot(0, head.count, self._endpoint)
        try:
            self._live = LiveRun(plan, place, plan.processes_per_node, spot=spot)
        except BaseException:
            head.end()
            raise

    def is_over(self) -> bool:
        """Whether its processes here have ended; ends them when others are gone for good."""
        if self._live.is_over():
            return True
        if trouble := self._head.trouble():
            now = time.monotonic()
            self._left_behind = self._left_behind or now
            if now - self._left_behind > LEFT_BEHIND_S and not self._killed_for:
                self._killed_for = trouble
                self._live.kill()
        return False

    def ask(self, number: int) -> None:
        """Hand a signal on: the processes of all machines agree on a step to stop after."""
        self._live.ask(number)

    def kill(self) -> None:
        """End the processes here at once; those of other machines follow."""
        self._live.kill()

    def finish(self) -> Record:
        """The record of this attempt; ends whatever still runs on any machine.

        Raises:
            RunError: the folder cannot be written.
        """
        self._live.kill()
        trouble = self._killed_for or self._head.trouble()
        self._head.end()  # first, since they may know which process died
        return self._with_reason(self._live.finish(), trouble)

    def _with_reason(self, record: Record, trouble: str) -> Record:
        """Where no process could say why, what is known of the other machines."""
        failure = record.failure
        if failure is None or not trouble or failure.message.startswith("process "):
            return record
        if not failure.lost_contact and not self._killed_for:
            return record
        failure.message = trouble
        record.outcome, record.exit_code = Outcome.crashed.name, Outcome.crashed.exit_code
        write_record(self.place.paths, record)
        return record


def start_run(
    plan: Plan, place: Place, head: Head | None, num_processes: int | None = None
) -> LiveRun | LedRun:
    """Start one attempt, here and on the machines that this one leads.

    Args:
        plan: what is to be done.
        place: where.
        head: of a run on several machines.
        num_processes: to start here, unless the plan's.

    Raises:
        BusyError: somebody works on this run.
        EkeError: machines are missing, or the folder cannot be written.
    """
    if head is not None:
        return LedRun(plan, place, head)
    return LiveRun(plan, place, num_processes or plan.batch.world_size)
