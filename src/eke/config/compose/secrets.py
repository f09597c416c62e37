"""Secrets in a configuration are refused: the files of runs and sweeps would hold them."""

from collections.abc import Mapping

from eke.common.errors import Problem
from eke.common.masking import masked

INSTEAD = "export NAME=...   (in the shell; or a file: slurm.setup=['export NAME=$(cat FILE)'])"


def secrets_in(config: Mapping[str, object]) -> list[Problem]:
    """A problem for each key, as typed or nested, whose text holds a secret."""
    found: dict[str, str] = {}
    masked(config, found=found)
    why = "holds a secret, which files that others read would hold, and trackers"
    fixes = {"tracker.uri": "tracker.uri=null   (and: export MLFLOW_TRACKING_URI=...)"}
    return [Problem(key, text, why, fixes.get(key, INSTEAD)) for key, text in found.items()]
