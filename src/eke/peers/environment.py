"""Command and environment of the processes that eke starts."""

import os
import re
import sys
from collections.abc import Mapping

from eke.paths import source_folder
from eke.peers.ranks import ranks_are_started

RANK_VARIABLES = (
    r"((LOCAL|GROUP|ROLE|NODE|CROSS)_)?(RANK|WORLD_SIZE)$|(LOCAL|CROSS)_SIZE$|ROLE_NAME$"
    r"|MASTER_(ADDR|PORT)$|TORCHELASTIC_|ACCELERATE_|OMPI_|PMI|MPI_LOCAL|MV2_COMM_WORLD|SUBMITIT_"
)
"""Names of variables that torchrun, accelerate, MPI or submitit set for one process of one job."""

TRACKED_RUN_VARIABLES = (
    r"WANDB_(RUN_ID|NAME|RESUME|SWEEP_ID|SWEEP_PARAM_PATH)$|WANDB_(LAUNCH|AGENT)|MLFLOW_RUN_ID$"
)
"""Names of variables that a tracker or a search agent sets for one run of its own."""

SAFE_PATH = "-P"
"""Python's option that leaves the current folder out of the import path."""

AGENT = ("WANDB_SWEEP_ID", "WANDB_RUN_ID")
"""What W&B's agent sets for a run that it starts."""

_OF_RANKS, _OF_TRACKED_RUNS = re.compile(RANK_VARIABLES), re.compile(TRACKED_RUN_VARIABLES)


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of eke's, `python -m MODULE ARGUMENTS`.

    Without `-P` a file `torch.py` in the folder where a command is typed would be imported first.
    """
    return [sys.executable, SAFE_PATH, "-m", module, *arguments]


def child_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """This process's environment for one that imports the same eke.

    What another launcher has set for another process is left out: a worker would take it for its
    own rank and rendezvous, or its own run of a tracker. Where torchrun, `accelerate launch` or
    W&B's agent started this run, all that they set is there, and stays.
    """
    kept = dict(environment)
    if not ranks_are_started():
        kept = {name: value for name, value in kept.items() if not _OF_RANKS.match(name)}
    if any(name not in kept for name in AGENT):
        kept = {name: value for name, value in kept.items() if not _OF_TRACKED_RUNS.match(name)}
    inherited = environment.get("PYTHONPATH")
    # An empty or relative entry is the folder where a command is typed.
    entries = filter(os.path.isabs, (inherited or "").split(os.pathsep))
    kept["PYTHONPATH"] = os.pathsep.join((source_folder(), *entries))
    kept["PYTHONSAFEPATH"] = "1"
    return kept
