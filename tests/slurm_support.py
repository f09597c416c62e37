"""A real SLURM for tests: starting one, sharing it between pytest's workers, asking it."""

import contextlib
import fcntl
import os
import random
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from support import REPO

MINICLUSTER = REPO / "slurm" / "minicluster"

START_S = 600.0
"""Longest `minicluster up`: it may install packages."""

SCAN_S = 30.0
"""How often SLURM 22.05 looks for expired time limits and graces (PERIODIC_TIMEOUT)."""

CLUSTER = ("-m", "hydra/launcher=slurm", "slurm=minicluster", "hardware=cpu")
"""A sweep into the cluster that SLURM_CONF names."""

_T = TypeVar("_T")
_alive: list[object] = []


class NoClusterError(Exception):
    """SLURM could not be installed or started here; its message says why."""


@dataclass(frozen=True)
class Cluster:
    """A cluster that runs."""

    folder: Path

    @property
    def conf(self) -> Path:
        """What SLURM_CONF names."""
        return self.folder / "slurm.conf"

    def variables(self) -> dict[str, str]:
        """The environment of its clients."""
        return {**os.environ, "SLURM_CONF": str(self.conf)}

    def ask(self, *command: str, timeout: float = 60) -> str:
        """What a client prints, without white space around it."""
        done = subprocess.run(
            command, env=self.variables(), capture_output=True, text=True, timeout=timeout
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr or done.stdout}"
        return done.stdout.strip()

    def sbatch(self, *arguments: str, script: str | None = None) -> str:
        """Submit; the job's id. `script` is bash, without its first line.

        What it prints is kept only where an argument says so: SLURM would put it where we are.
        """
        wrapped = ("--wrap", script) if script is not None else ()
        return self.ask("sbatch", "--parsable", "--output=/dev/null", *arguments, *wrapped)

    def state(self, job: str) -> str:
        """State of a job that SLURM remembers, from squeue: `RUNNING`."""
        return self.ask("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job}")

    def job(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says about one job; values end at a space."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.ask("scontrol", "show", "job", job)))

    def wait_for(self, job: str, *states: str, timeout: float = 60) -> str:
        """Until the job is in one of these states; which."""
        return wait_until(
            lambda: (state := self.state(job)) in states and state, f"{job}: {states}", timeout
        )

    def clear(self) -> None:
        """Cancel every job, and wait until none is left."""
        self.ask("scancel", "--user", str(os.getuid()))
        wait_until(lambda: not self.ask("squeue", "--noheader"), "an empty queue")


def wait_until(condition: Callable[[], _T], what: str, timeout: float = 60) -> _T:
    """Ask until the answer is true; the answer. TimeoutError names `what`."""
    deadline = time.monotonic() + timeout
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout:.0f} s: {what}")
        time.sleep(0.1)
    return answer


def free_ports(count: int = 4) -> int:
    """The first of some ports in a row that nobody listens on, below those the kernel hands out."""
    while True:
        first = random.SystemRandom().randrange(20000, 30000)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


def minicluster(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run slurm/minicluster with a port of its own and these variables."""
    inherited = {k: v for k, v in os.environ.items() if k != "SLURM_CONF"}
    return subprocess.run(
        [str(MINICLUSTER), *arguments],
        env={**inherited, "MINICLUSTER_PORT": str(free_ports()), **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=START_S,
    )


def start(folder: Path, *options: str, **variables: str) -> Cluster:
    """`minicluster up`, which does nothing where it runs already; NoClusterError says why not."""
    done = minicluster("up", str(folder), *options, **variables)
    if done.returncode:
        raise NoClusterError(done.stderr.strip())
    return Cluster(folder)


def pids_of(*texts: str) -> list[int]:
    """Processes, srun left out, whose command line has all of these."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended
            words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if all(text in words for text in texts) and "srun" not in words.split()[0]:
                found.append(int(process.name))
    return found


def processes_with(text: str, file: str) -> list[str]:
    """Processes that have a text in their `environ` or `cmdline`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended, or is somebody else's
            if text.encode() in (process / file).read_bytes():
                found.append(process.name)
    return found


def processes_of(cluster: Path) -> list[str]:
    """Processes that know a cluster's slurm.conf."""
    return processes_with(f"SLURM_CONF={cluster}/slurm.conf", "environ")


@contextlib.contextmanager
def shared(session: str, variables: Mapping[str, str]) -> Iterator[Cluster]:
    """One cluster for all workers of a pytest session: up for the first, down after the last.

    Each holds a lock while it uses the cluster, which the kernel takes back from whoever dies.
    Where all of them are killed, a process that waits for a second such lock ends the cluster.

    Args:
        session: What the workers of one session, and nobody else, have in common.
        variables: Settings of the cluster, from whoever is first.
    """
    folder = Path(tempfile.gettempdir()) / f"eke-slurm-{session}"
    with open(f"{folder}.users", "w") as users:
        alive = open(f"{folder}.alive", "w")  # noqa: SIM115  # held until this process ends
        _alive.append(alive)
        fcntl.flock(alive, fcntl.LOCK_SH)
        fcntl.flock(users, fcntl.LOCK_SH)  # waits while another one ends the cluster
        afterwards = '"$1" down "$2"; rm -f "$2.users" "$2.alive" "$2.turn"'
        guard = f'setsid flock "$2.alive" bash -c \'{afterwards}\' - "$1" "$2" &'
        subprocess.run(
            ["bash", "-c", guard, "-", str(MINICLUSTER), str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
        )
        try:
            yield start(folder, **variables)
        finally:
            fcntl.flock(users, fcntl.LOCK_UN)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody else uses it
                minicluster("down", str(folder))


@contextlib.contextmanager
def turn(cluster: Cluster) -> Iterator[None]:
    """Have the cluster alone, and leave it without jobs."""
    with open(f"{cluster.folder}.turn", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            cluster.clear()
