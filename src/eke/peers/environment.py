"""The environment of processes that eke starts."""

import os
import re
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

_OF_ANOTHER = re.compile(f"{RANK_VARIABLES}|{TRACKED_RUN_VARIABLES}")


def child_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """This process's environment for one that imports the same eke.

    What another launcher has set for another process is left out: a worker would take it for its
    own rank and rendezvous. Where torchrun or `accelerate launch` started this run, it stays.
    """
    kept = dict(environment)
    if not ranks_are_started():
        kept = {name: value for name, value in kept.items() if not _OF_ANOTHER.match(name)}
    inherited = environment.get("PYTHONPATH")
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, (source_folder(), inherited)))
    return kept
