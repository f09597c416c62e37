"""Where things are: every file name inside a run folder, and the configuration eke ships with."""

import os
from dataclasses import dataclass
from pathlib import Path

SUPERVISOR = "EKE_SUPERVISOR"
"""Environment variable with the process id of whoever watches over a worker."""


@dataclass(frozen=True)
class RunPaths:
    """The files of one run; nothing else in eke spells these names."""

    folder: Path

    @property
    def config(self) -> Path:
        """The resolved configuration, for people; no code reads it back."""
        return self.folder / "config.yaml"

    @property
    def plan(self) -> Path:
        """What is to be done, for the worker."""
        return self.folder / "plan.json"

    @property
    def record(self) -> Path:
        """What was done."""
        return self.folder / "record.json"

    @property
    def metrics(self) -> Path:
        """One JSON object a line: the truth about the training curve."""
        return self.folder / "metrics.jsonl"

    @property
    def attempts(self) -> Path:
        """One JSON object a line for each time a worker started on this run."""
        return self.folder / "attempts.jsonl"

    @property
    def log(self) -> Path:
        """Everything the worker printed."""
        return self.folder / "train.log"

    @property
    def checkpoints(self) -> Path:
        """One folder per checkpoint."""
        return self.folder / "checkpoints"

    @property
    def lock(self) -> Path:
        """Held (flock) by the process that works on the run."""
        return self.folder / ".lock"


@dataclass(frozen=True)
class SweepPaths:
    """The files of one sweep."""

    folder: Path

    @property
    def sweep(self) -> Path:
        """Every cell: overrides, run, verdict and reason."""
        return self.folder / "sweep.json"


def user_path(text: str) -> Path:
    """A path as a user types it: `~` is a home folder, where there is such a one."""
    return Path(os.path.expanduser(text))


def conf_folder() -> Path:
    """The folder with `config.yaml`: in an installed package, else beside `src` in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "conf"
    return installed if installed.is_dir() else package.parents[1] / "conf"
