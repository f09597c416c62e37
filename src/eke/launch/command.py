"""Launcher `command`: each run behind a prefix, such as `ssh HOST` or `docker exec NAME`."""

import contextlib
import hashlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from eke.common.errors import BusyError, ConfigError, EkeError, Fix, Problem, RunError
from eke.common.files import is_locked, read_json, write_json
from eke.common.paths import SUPERVISOR, RunPaths, SweepPaths, source_folder, user_path
from eke.common.process_env import RANK_VARIABLES, TRACKED_RUN_VARIABLES
from eke.config.schema import Config
from eke.hardware import DeviceSlot
from eke.launch.devices import DeviceLease, Devices
from eke.launch.interface import JobStatus, Launcher, PlannedDevice, declared_target
from eke.launch.local import FreeMemory, Pool
from eke.launch.processes import prefix_runner
from eke.launch.processes.prefix_runner import ALIVE, GONE, LOCK, order_digest
from eke.launch.processes.run_attempt import RunAttempt
from eke.launch.processes.sweep_scheduler import SweepState
from eke.launch.processes.worker_process import Worker, start_process, worker_command
from eke.plan.planner import Plan

_CALL_S = 60.0
"""Time limit in seconds for a call through the prefix that signals or checks a worker."""


def _remote_command(prefix: Sequence[str], action: str, folder: Path, *rest: str) -> list[str]:
    runner = str(Path(prefix_runner.__file__).absolute())
    # -I keeps PYTHONPATH and the current folder off the runner's import path.
    return [*prefix, sys.executable, "-I", runner, action, str(folder.absolute()), *rest]


def call(prefix: Sequence[str], action: str, folder: Path, *rest: str) -> int:
    """Check, signal or end a run's worker. Return `ALIVE` or `GONE`, else raise EkeError."""
    command = _remote_command(prefix, action, folder, *rest)
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=_CALL_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EkeError(f"{shlex.join(prefix)}: {error}") from error
    if done.returncode not in (ALIVE, GONE):
        said = done.stderr.strip().splitlines()
        raise EkeError(f"{shlex.join(prefix)}: {said[-1] if said else done.returncode}")
    return done.returncode


def _prefix_of(ticket: Path) -> list[str]:
    try:
        return [str(word) for word in read_json(ticket, own=True)["prefix"]]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise EkeError(f"{ticket}: not readable ({error})") from error


class PrefixedWorker(Worker):
    """A worker behind a prefix. Each signal is sent through a new call of the prefix."""

    def __init__(
        self,
        paths: RunPaths,
        prefix: Sequence[str],
        ticket: str,
        num_processes: int = 1,
        descriptors: Sequence[int] = (),
    ) -> None:
        """Start the worker. Raise BusyError if an earlier one may be alive, OSError on failure."""
        self.paths, self.prefix, self.ticket = paths, prefix, paths.folder / ticket
        self._calls: list[subprocess.Popen[bytes]] = []
        if self.ticket.exists():
            try:
                call(_prefix_of(self.ticket), "end", paths.folder)
            except EkeError as error:
                why = f"its earlier worker may still be alive ({error})"
                raise BusyError(f"{why}. If it has ended, delete {self.ticket}") from error
        own = {"PYTHONPATH": source_folder(), "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
        (paths.folder / LOCK).unlink(missing_ok=True)
        order = {
            "prefix": list(prefix),
            "command": worker_command(RunPaths(paths.folder.absolute()), num_processes),
            "environment": own,
            "foreign": f"{RANK_VARIABLES}|{TRACKED_RUN_VARIABLES}",
            "supervisor": SUPERVISOR,
        }
        write_json(self.ticket, order)
        far = _remote_command(prefix, "start", paths.folder, ticket, order_digest(order))
        self.process = start_process(far, paths.log, descriptors)

    def _call(self, action: str, *rest: str) -> None:
        with contextlib.suppress(OSError):
            far = _remote_command(self.prefix, action, self.paths.folder, *rest)
            self._calls.append(start_process(far, self.paths.log))

    def ask(self, number: int) -> None:
        """Forward a signal. The worker then saves a checkpoint and stops."""
        self._call("signal", str(number))

    def kill(self) -> None:
        """Send SIGKILL to the worker's process group."""
        self._call("end")

    def finish(self) -> int:
        """Ensure that the worker has ended, else raise RunError. Return its exit code (-signal)."""
        try:
            if (self.paths.folder / LOCK).exists():  # else the prefix never started the runner
                call(self.prefix, "end", self.paths.folder)
        except EkeError as error:
            raise RunError(f"its worker may still be alive: {error}") from error
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            code = self.process.wait()
            for each in self._calls:
                each.kill()
                each.wait()
        self.ticket.unlink(missing_ok=True)
        return 128 - code if 128 < code <= 192 else code  # a signal, up to SIGRTMAX of Linux


class CommandLauncher(Launcher):
    """Starts runs behind the prefixes of `launcher.prefix`, one at a time per prefix.

    Run folders, eke and its Python must have the same paths behind the prefix.
    """

    name = "command"
    not_probed = "the command prefix leads to another machine"
    unused_keys = ("cpu_slots", "runs_per_device")

    def prefixes(self, config: Config) -> list[str]:
        """Return the command prefixes. Launchers of other packages override this method."""
        return config.launcher.prefix

    def target(self, config: Config) -> PlannedDevice:
        """Return the device that `hardware` declares. Raise ConfigError without a valid prefix."""
        prefixes, runs = self.prefixes(config), str(user_path(config.paths.runs).absolute())
        key, fix, problems = "launcher.prefix", Fix("launcher.prefix=[ssh HOST]"), []
        if not prefixes:
            why = f"hydra/launcher={self.name} needs at least one prefix"
            problems.append(Problem(key, "[]", why, fix, "missing_value"))
        for text in prefixes:
            words: list[str] = []
            with contextlib.suppress(ValueError):
                words = shlex.split(text)
            if not words:
                why = "must be a command that a shell can read"
                problems.append(Problem(key, repr(text), why, fix, "wrong_type"))
        if shlex.quote(runs) != runs:
            why = "may only have letters, digits and @%+=:,./-_: a shell may read it"
            fix = Fix("paths.runs=FOLDER")
            problems.append(Problem("paths.runs", runs, why, fix, "unsafe_path"))
        if problems:
            raise ConfigError(problems)
        return declared_target(config)

    def start(self, books: SweepState, paths: SweepPaths, sweep: str) -> Pool:
        """Return a pool of the prefixes. Its runs start in `wait`."""
        prefixes = [text for job in books.jobs for text in self.prefixes(job.plan.config)]
        slots = []
        for text in dict.fromkeys(prefixes):  # leased: two sweeps never share a prefix
            lease = f"command-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
            slots.append(DeviceSlot(text, text, lease))
        devices = Devices(slots, slots_per_run=1)
        kinds = {job.kind: devices for job in books.jobs}
        # Free memory behind the prefix is unknown here.
        return Pool(books, kinds, self.start_run, room=partial(FreeMemory, free=lambda _: None))

    def start_run(self, plan: Plan, paths: RunPaths, grant: DeviceLease) -> RunAttempt:
        """Start a run behind its leased prefix."""
        prefix, ticket = shlex.split(grant.slots[0].device), paths.ticket(self.name).name
        count = plan.batch.world_size
        start = partial(PrefixedWorker, paths, prefix, ticket, count)
        return RunAttempt(plan, paths, count, lambda lock: start([lock, *grant.descriptors]))

    def status(self, runs: Sequence[RunPaths]) -> dict[Path, JobStatus]:
        """Return the workers that are alive. Ask the prefix about workers without a supervisor."""
        found = {}
        for paths in runs:
            try:
                prefix = _prefix_of(paths.ticket(self.name))
                where = f"behind {shlex.join(prefix)}"
                name = str(paths.folder)
                if is_locked(paths.lock):
                    found[paths.folder] = JobStatus(name, where)
                elif call(prefix, "check", paths.folder) == ALIVE:
                    found[paths.folder] = JobStatus(name, where, f"{where}, without a supervisor")
            except EkeError as error:
                found[paths.folder] = JobStatus("", silent=str(error))
        return found

    def cancel(self, jobs: Sequence[str]) -> None:
        """Send SIGINT to each worker through its prefix. Raise EkeError if a call failed."""
        failed = []
        for paths in (RunPaths(Path(name)) for name in jobs):
            try:
                prefix = _prefix_of(paths.ticket(self.name))
                call(prefix, "signal", paths.folder, str(int(signal.SIGINT)))
            except EkeError as error:
                failed.append(str(error))
        if failed:
            raise EkeError("; ".join(failed))
