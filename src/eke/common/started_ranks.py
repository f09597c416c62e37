"""Being one of several processes that torchrun or `accelerate launch` started by hand."""

import os
import time

from eke.common.cluster_task import this_task
from eke.common.errors import ConfigError, Problem
from eke.common.paths import LOCAL_RANK, LOCAL_WORLD_SIZE, RANK, WORLD_SIZE, program

RENDEZVOUS = (RANK, WORLD_SIZE, LOCAL_RANK, "MASTER_ADDR", "MASTER_PORT")
"""Variables of torchrun's for each process (https://docs.pytorch.org/docs/stable/elastic/run.html)."""

#: What rank 0 may need to say why nothing runs, s: the launcher ends all ranks when one leaves.
SPEECH_S = 30.0


def started_ranks() -> int:
    """How many processes torchrun or `accelerate launch` started for this run; 1 without them.

    Both set all that an `env://` rendezvous reads; a part of it is left over from another job.
    """
    if any(name not in os.environ for name in RENDEZVOUS):
        return 1
    try:
        return max(1, int(os.environ[WORLD_SIZE]))
    except ValueError:
        return 1


def ranks_are_started() -> bool:
    """Whether this process is one of several of the same run."""
    return started_ranks() > 1


def my_rank() -> int:
    """The number of this process among them; 0 for the one that plans, prints and writes."""
    return int(os.environ[RANK]) if ranks_are_started() else 0


def is_first() -> bool:
    """Whether this process speaks for all that were started for the same command."""
    return my_rank() == 0 and this_task().node == 0


def machines_at_hand() -> int:
    """Machines that somebody has started this command on: by srun, or by torchrun."""
    try:
        here = int(os.environ.get(LOCAL_WORLD_SIZE, "1"))
    except ValueError:
        here = 1
    return max(this_task().count, started_ranks() // max(1, here) if ranks_are_started() else 1)


def check_started_ranks(option: str, num_processes: int) -> None:
    """The launcher and the configuration must speak of the same number of processes.

    Args:
        option: of the group `distributed`, or `a sweep`.
        num_processes: what the configuration says.

    Raises:
        ConfigError: they do not.
    """
    started = started_ranks()
    if started in (1, num_processes):
        return
    why = f"{started} processes were started for this run, as {WORLD_SIZE} in the environment says"
    fix = f"distributed.num_processes={started}"
    if option == "a sweep":
        why = f"{why}; a sweep starts its own"
        fix = f"{program()} -m ...   (without torchrun or accelerate launch)"
    elif option == "none":
        fix = f"distributed=ddp {fix}"
    raise ConfigError(Problem("distributed.num_processes", str(num_processes), why, fix))


def let_rank_0_speak() -> None:
    """Wait, in another rank, until the launcher ends it because rank 0 has spoken and left.

    All ranks find the same mistake at about the same time, and torchrun sends SIGTERM to the
    others as soon as the first one leaves: rank 0 must be the first.
    """
    time.sleep(SPEECH_S)
