"""Command and environment of child processes; detection of externally started ranks."""

import logging
import os
import re
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.files import own_folder
from eke.common.paths import (
    LOCAL_RANK,
    LOCAL_WORLD_SIZE,
    RANK,
    WORLD_SIZE,
    home_folder,
    program,
    source_folder,
    user_path,
)
from eke.common.streams import speak


@dataclass(frozen=True)
class SlurmTask:
    """A task of a SLURM step."""

    node: int
    """Index of the task; 0 is the leader."""
    count: int
    """Number of tasks in the step, one per machine."""
    step: str
    """Unique identifier of the step, different for each restart of a job: `123.0.1`."""


def this_task(environment: Mapping[str, str] = os.environ) -> SlurmTask:
    """This process's SLURM task; a single task outside SLURM."""
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_JOB_ID", "SLURM_STEP_ID")
    rank, count, job, step = (environment.get(name, "") for name in names)
    if not (rank.isdecimal() and count.isdecimal()):
        return SlurmTask(0, 1, "")
    restarts = environment.get("SLURM_RESTART_COUNT", 0)
    return SlurmTask(int(rank), int(count), f"{job}.{step}.{restarts}")


def check_started_tasks(what: str, num_nodes: int) -> None:
    """Raise ConfigError if the SLURM step has other machines than a run (1 for a sweep)."""
    count = this_task().count
    if count in (1, num_nodes):
        return
    why = f"srun has started {count} tasks, and {what} takes one on each of its machines"
    fix = Fix(remark=f"srun --ntasks={num_nodes} --ntasks-per-node=1 {program()} ...")
    raise ConfigError(Problem("distributed.num_nodes", str(num_nodes), why, fix))


RENDEZVOUS = (RANK, WORLD_SIZE, LOCAL_RANK, "MASTER_ADDR", "MASTER_PORT")
"""Variables that torchrun sets for each process (https://docs.pytorch.org/docs/stable/elastic/run.html)."""

SPEECH_S = 30.0
"""Time for rank 0 to report an error: torchrun ends all ranks as soon as the first one exits."""


def started_ranks() -> int:
    """Number of processes that torchrun or `accelerate launch` started; 1 without them."""
    if any(name not in os.environ for name in RENDEZVOUS):  # a remnant of another job
        return 1
    try:
        return max(1, int(os.environ[WORLD_SIZE]))
    except ValueError:
        return 1


def ranks_are_started() -> bool:
    """Whether this process is one of several ranks of the same run."""
    return started_ranks() > 1


def my_rank() -> int:
    """Rank of this process; rank 0 plans, prints and writes."""
    return int(os.environ[RANK]) if ranks_are_started() else 0


def is_first() -> bool:
    """Whether this process reports for all processes of the same command."""
    return my_rank() == 0 and this_task().node == 0


def machines_at_hand() -> int:
    """Number of machines that srun or torchrun started this command on."""
    try:
        here = int(os.environ.get(LOCAL_WORLD_SIZE, "1"))
    except ValueError:
        here = 1
    return max(this_task().count, started_ranks() // max(1, here) if ranks_are_started() else 1)


def check_started_ranks(option: str, num_processes: int) -> None:
    """Raise ConfigError for other started processes than `distributed=option` (or a sweep) has."""
    started = started_ranks()
    if started in (1, num_processes):
        return
    why = f"{started} processes were started for this run, as {WORLD_SIZE} in the environment says"
    fix = Fix(f"distributed.num_processes={started}")
    if option == "a sweep":
        why = f"{why}; a sweep starts its own"
        fix = Fix(remark=f"{program()} -m ...   (without torchrun or accelerate launch)")
    elif option == "none":
        fix = Fix(remark=f"distributed=ddp {fix}")
    raise ConfigError(Problem("distributed.num_processes", str(num_processes), why, fix))


RANK_VARIABLES = (
    r"((LOCAL|GROUP|ROLE|NODE|CROSS)_)?(RANK|WORLD_SIZE)$|(LOCAL|CROSS)_SIZE$|ROLE_NAME$"
    r"|MASTER_(ADDR|PORT)$|TORCHELASTIC_|ACCELERATE_|OMPI_|PMI|MPI_LOCAL|MV2_COMM_WORLD|SUBMITIT_"
)
"""Variables that torchrun, accelerate, MPI or submitit set for one process of one job."""

TRACKED_RUN_VARIABLES = (
    r"WANDB_(RUN_(ID|NAME)|NAME|RESUME(_FROM)?|FORK_FROM|SWEEP_ID|SWEEP_PARAM_PATH)$"
    r"|WANDB_(LAUNCH|AGENT)|MLFLOW_(RUN_ID|NESTED_RUN)$"
)
"""Variables that a tracker or a search agent sets for a single run."""

SAFE_PATH = "-P"
"""Python's option that removes the current folder from the import path."""

AGENT = ("WANDB_SWEEP_ID", "WANDB_RUN_ID")
"""Variable that W&B's agent sets for each run it starts."""


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of eke; no `torch.py` in the current folder is imported."""
    return [sys.executable, SAFE_PATH, "-m", module, *arguments]


VERBOSE = "EKE_VERBOSE"
"""Environment variable: loggers at level debug, with commas."""


def be_verbose() -> None:
    """Set these loggers to level debug, on standard error; a worker's is train.log."""
    for name in filter(None, os.environ.get(VERBOSE, "").split(",")):
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        logging.getLogger(name).setLevel(logging.DEBUG)


def child_environment() -> dict[str, str]:
    """This process's environment, for a child that imports the same eke."""
    kept = dict(os.environ)
    # Incomplete variables of torchrun, `accelerate launch` or W&B's agent are another process's: a
    # worker would read them as its rank, rendezvous or tracker run.
    if not ranks_are_started():
        kept = {name: value for name, value in kept.items() if not re.match(RANK_VARIABLES, name)}
    if any(name not in kept for name in AGENT):
        kept = {k: value for k, value in kept.items() if not re.match(TRACKED_RUN_VARIABLES, k)}
    # An empty or relative entry refers to the current folder.
    entries = filter(os.path.isabs, kept.get("PYTHONPATH", "").split(os.pathsep))
    kept["PYTHONPATH"] = os.pathsep.join((source_folder(), *entries))
    kept["PYTHONSAFEPATH"] = "1"
    return kept


def ensure_home() -> None:
    """Set HOME, for libraries, to a private folder if this user id has no home."""
    if not user_path("~").is_absolute():
        with suppress(OSError):
            os.environ["HOME"] = str(own_folder(home_folder(), private=True))


def leave_tracked_run() -> None:
    """Remove variables that mean one tracked run: each of several runs has a separate id."""
    if all(name in os.environ for name in AGENT):
        why = "W&B's agent names one run: these runs are outside its sweep"
        speak(f"  warning: {why}", sys.stderr)
    for name in [each for each in os.environ if re.match(TRACKED_RUN_VARIABLES, each)]:
        del os.environ[name]


def end_with_parent(number: signal.Signals, parent: str) -> None:
    """Have the kernel send a signal to this process when `parent` (its process id) dies."""
    if not parent.isdigit():
        return
    import ctypes  # of no use to most commands

    set_parent_death_signal = 1  # PR_SET_PDEATHSIG, linux/prctl.h
    try:
        ctypes.CDLL(None).prctl(set_parent_death_signal, number)
    except (OSError, AttributeError):  # not Linux
        return
    if os.getppid() != int(parent):  # it died before the call
        os.kill(os.getpid(), number)
