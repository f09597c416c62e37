"""`rerun=true` of a sweep is met once, however often the sweep is interrupted and typed again."""

import contextlib
import fcntl
import os
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from eke.common.files import open_file, own_folder, read_json, write_json
from eke.common.paths import RunPaths, SweepPaths, user_path
from eke.launch.processes.sweep_job import CHANGED, Job
from eke.plan.planner import Plan
from eke.plan.record import Outcome


class Rerun:
    """One demand to run a sweep again; those who type it before it is met work on the same one.

    Its file holds, of each run, the folders that were finished before. It is met once all others
    have a final record; should one of these be set aside, it is not.
    """

    def __init__(self, paths: SweepPaths, jobs: Sequence[Job]) -> None:
        self.paths, self.jobs = paths, [job for job in jobs if job.plan.config.rerun]
        self.goes_on = False
        """Whether it was begun by an earlier command."""
        self._state: dict[str, Any] = {}
        if not self.jobs:
            return
        with self._held():
            runs = paths.folder.parent
            known = self._read()
            met = known.get("met")
            if known and (met is None or not all(_is_final(runs / name) for name in met)):
                self._state, self.goes_on = {**known, "met": None}, True
            else:
                self._state = {"begun": uuid.uuid4().hex, "old": {}, "met": None}
            old = self._state["old"]
            for plan in (job.plan for job in self.jobs):
                names = old.get(plan.run_id, _folders(plan))
                old[plan.run_id] = [name for name in names if _is_final(runs / name)]
            self._write()

    @property
    def old(self) -> set[str]:
        """Names of folders whose final records do not meet it."""
        return {name for names in self._state.get("old", {}).values() for name in names}

    def end(self) -> None:
        """Note that it is met, if it is: the same command begins another one."""
        ends = [job.outcome for job in self.jobs if job.rule != CHANGED]
        never = (Outcome.skipped, Outcome.refused)
        if not ends or len(ends) < len(self.jobs):
            return
        if not all(outcome and (outcome.is_final or outcome in never) for outcome in ends):
            return
        with self._held():
            if self._read().get("begun") == self._state["begun"]:
                done = [job for job in self.jobs if job.outcome and job.outcome.is_final]
                self._state["met"] = [Path(job.folder).name for job in done]
                self._write()

    def _read(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            return dict(read_json(self.paths.rerun))
        return {}

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # a full disk: it holds for this command alone
            write_json(self.paths.rerun, self._state)

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """Nobody else reads or writes the file in here, where there are locks."""
        with contextlib.ExitStack() as held:
            with contextlib.suppress(OSError):
                own_folder(self.paths.folder)
                lock = self.paths.rerun.with_suffix(".lock")
                descriptor = open_file(lock, os.O_RDWR | os.O_CREAT)
                held.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield


def _folders(plan: Plan) -> Iterator[str]:
    """Names of a run's folders that are there."""
    runs, name, number = user_path(plan.config.paths.runs), plan.run_id, 1
    while (runs / name).exists():
        yield name
        number += 1
        name = f"{plan.run_id}-{number}"


def _is_final(folder: Path) -> bool:
    try:
        return Outcome[read_json(RunPaths(folder).record)["outcome"]].is_final
    except (OSError, ValueError, KeyError, TypeError):
        return False
