"""One run on this machine, watched by whoever typed it."""

import time
from typing import Protocol

from eke.common.started_ranks import ranks_are_started
from eke.launch.nodes import Head, start_run
from eke.launch.processes.follow import View, open_view
from eke.launch.processes.run_dir import Place
from eke.launch.processes.worker_process import forward_signals
from eke.plan.planner import Plan
from eke.plan.record import Record

POLL_S = 0.1
"""Between two looks at the worker."""


class Watched(Protocol):
    """Processes of one run."""

    def is_over(self) -> bool:
        """Whether they have ended."""
        ...

    def ask(self, number: int) -> None:
        """Hand a signal on."""
        ...

    def kill(self) -> None:
        """End them at once."""
        ...


def run_single(plan: Plan, place: Place, head: Head | None = None) -> Record:
    """Run, or continue, the plan in its folder, and show it.

    Args:
        plan: what is to be done.
        place: where.
        head: knows the other machines of a run that has several.

    Raises:
        BusyError: somebody works on this run.
        EkeError: machines are missing, or the folder cannot be written.
    """
    with open_view(place.paths, plan.steps.total) as view:
        live = start_run(plan, place, head, 1 if ranks_are_started() else None)
        try:
            watch(live, view)
        finally:
            record = live.finish()
        view.update(last=True)
    return record


def watch(live: Watched, view: View) -> None:
    """Show a run until it is over; signals go on to it."""
    with forward_signals(live.ask, live.kill):
        while not live.is_over():
            view.update()
            time.sleep(POLL_S)
