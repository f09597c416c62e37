"""wandb-workspaces, imported when it is needed and named when it is missing."""

import os
import warnings
from types import ModuleType

from eke.common.errors import ConfigError

INSTALL = 'pip install "eke[report]"'


def workspaces() -> ModuleType:
    """The module `wandb_workspaces.reports.v2`: reports, blocks and panels.

    Raises:
        ConfigError: it is not installed.
    """
    # Otherwise W&B sends telemetry, and waits 10 s for a host that never answers.
    os.environ["WANDB_ERROR_REPORTING"] = "false"
    try:
        with warnings.catch_warnings():
            # wandb-workspaces 0.4: its classes use pydantic's former names.
            warnings.simplefilter("ignore", DeprecationWarning)
            import wandb_workspaces.reports.v2 as reports
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("wandb_workspaces", "wandb"):
            raise
        raise ConfigError(
            f"--wandb needs the package wandb-workspaces, which is not installed -> {INSTALL}"
        ) from None
    return reports
