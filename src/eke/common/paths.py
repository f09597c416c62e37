"""Paths: file names of a run folder and a sweep folder, and eke's own configuration."""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

SUPERVISOR = "EKE_SUPERVISOR"
"""Environment variable with the process id of a worker's supervisor."""

AGENT = "EKE_AGENT"
"""Environment variable with the process id of the agent that started a run's ranks."""

MEETING = "EKE_MEETING"
"""Environment variable with the rendezvous file of the ranks of one machine."""

SHARED_DEVICE = "EKE_SHARED_DEVICE"
"""Environment variable that marks a worker's device as shared with other runs."""

RANK, LOCAL_RANK = "RANK", "LOCAL_RANK"
WORLD_SIZE, LOCAL_WORLD_SIZE = "WORLD_SIZE", "LOCAL_WORLD_SIZE"
"""torchrun's environment variables: rank, local rank, world size and local world size
(https://docs.pytorch.org/docs/stable/elastic/run.html)."""

CHECKPOINT_FILES = "manifest.json"
"""File of a checkpoint with the size and the checksum of each of its files."""

EXPORT = "model"
"""Folder of a checkpoint with the exported model in the Hub's layout."""


def checkpoint_name(step: int) -> str:
    """Folder name of the checkpoint after `step` optimizer steps."""
    return f"step-{step:08d}"


class _Inside:
    """A file or folder inside the `folder` of its owner."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, owner: "RunPaths | SweepPaths", _: object) -> Path:
        return owner.folder / self.name


@dataclass(frozen=True)
class RunPaths:
    """The files of one run; the only place in eke with these names."""

    folder: Path

    @property
    def is_run(self) -> bool:
        """Whether the folder has a record or a plan."""
        return self.record.exists() or self.plan.exists()

    config = _Inside("config.yaml")
    """The resolved configuration, for people only; no code reads it."""
    plan = _Inside("plan.json")
    """The plan that the worker executes."""
    record = _Inside("record.json")
    """The record of the run."""
    metrics = _Inside("metrics.jsonl")
    """The training curve, one JSON object per line."""
    attempts = _Inside("attempts.jsonl")
    """One JSON object per line for each start of a worker on this run."""
    log = _Inside("train.log")
    """Output of the worker."""

    def rank_log(self, rank: int) -> Path:
        """Output of a rank other than 0."""
        return self.folder / f"rank_{rank}.log"

    def rank_failure(self, rank: int) -> Path:
        """Reason for the failure of a rank other than 0."""
        return self.folder / f"rank_{rank}.json"

    def dead_rank(self, node: int = 0) -> Path:
        """First process of a machine to end and its exit status, written by the agent."""
        return self.folder / (f"dead_rank_{node}.json" if node else "dead_rank.json")

    def node_log(self, node: int) -> Path:
        """Output of a machine other than the first; its processes have separate logs."""
        return self.folder / f"node_{node}.log"

    invitation = _Inside("nodes.json")
    """Address of a run's first machine for the others, valid during one job."""

    def ticket(self, launcher: str) -> Path:
        """The launcher's current or last job for the run."""
        return self.folder / f"{launcher}.json"

    planned_with = _Inside("planned_with.json")
    """Fingerprint of the machine that planned a run for a cluster."""
    checkpoints = _Inside("checkpoints")
    """One folder per checkpoint."""

    def exported(self, step: int) -> Path:
        """The exported model in the checkpoint after `step` optimizer steps."""
        return self.checkpoints / checkpoint_name(step) / EXPORT

    receipt = _Inside("sync.json")
    """Data that `eke sync` has sent, and its destination."""
    sync_lock = _Inside(".sync.lock")
    """Held (flock) by the `eke sync` that sends the run."""
    model = _Inside("model")
    """Link to the newest checkpoint's export, which plain transformers can load."""
    lock = _Inside(".lock")
    """Held (flock) by the process that works on the run."""


_WATCHER = ".watcher-"


@dataclass(frozen=True)
class SweepPaths:
    """The files of one sweep."""

    folder: Path

    sweep = _Inside("sweep.json")
    """Every cell: overrides, run, verdict and reason."""

    def watcher(self, host: str, process: int) -> Path:
        """Held (flock) by a process that supervises the sweep."""
        return self.folder / f"{_WATCHER}{host}-{process}"

    def watchers(self) -> list[Path]:
        """The supervisors' lock files, including those of ended processes."""
        return sorted(self.folder.glob(f"{_WATCHER}*"))

    def who_watches(self, lock: Path) -> tuple[str, str]:
        """Host and process id in the name of a supervisor's lock file."""
        host, _, process = lock.name.removeprefix(_WATCHER).rpartition("-")
        return host, process

    rerun = _Inside("rerun.json")
    """Progress of the newest `rerun=true` (eke.launch.processes.sweep_state)."""

    def launcher(self, name: str) -> Path:
        """Folder for the launcher's own files of the sweep."""
        return self.folder / name


def user_path(text: str) -> Path:
    """Expand `~` in a user's path where the home folder exists."""
    return Path(os.path.expanduser(text))


def home_folder() -> Path:
    """The home folder; a temporary one for a user id without HOME and without a passwd entry."""
    home = user_path("~")
    return home if home.is_absolute() else Path(tempfile.gettempdir()) / f"eke-{os.geteuid()}"


def short_path(path: Path) -> str:
    """A path, on one line, as in a command in the current folder: in full if it is outside."""
    relative = os.path.relpath(path)
    return " ".join((str(path) if relative.startswith("..") else relative).split("\n"))


def conf_folder() -> Path:
    """The folder with `config.yaml`: in an installed package, else next to `src` in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "conf"
    return installed if installed.is_dir() else package.parents[1] / "conf"


def program() -> str:
    """Command that starts a training: train.py in a checkout, `eke` when installed."""
    is_checkout = (Path(__file__).resolve().parents[3] / "train.py").is_file()
    return "python train.py" if is_checkout else "eke train"


def source_folder() -> str:
    """The folder that eke is imported from."""
    return str(Path(__file__).resolve().parents[2])
