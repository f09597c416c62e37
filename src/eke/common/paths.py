"""File names of run and sweep folders, and the location of eke's configuration."""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

SUPERVISOR = "EKE_SUPERVISOR"
"""Environment variable with the process id of a worker's supervisor."""

AGENT = "EKE_AGENT"
"""Environment variable with the process id of the agent that started a run's ranks."""

RENDEZVOUS_VARIABLE = "EKE_MEETING"
"""Environment variable with the rendezvous file of the ranks of one node."""

SHARED_DEVICE = "EKE_SHARED_DEVICE"
"""Environment variable that marks a worker's device as shared with other runs."""

RANK, LOCAL_RANK = "RANK", "LOCAL_RANK"
WORLD_SIZE, LOCAL_WORLD_SIZE = "WORLD_SIZE", "LOCAL_WORLD_SIZE"
"""torchrun's environment variables: rank, local rank, world size and local world size
(https://docs.pytorch.org/docs/stable/elastic/run.html)."""

CHECKPOINT_FILES = "manifest.json"
"""File of a checkpoint with size and checksum of its other files."""

EXPORT = "model"
"""Folder of a checkpoint with the exported model in the Hub's layout."""


def checkpoint_name(step: int) -> str:
    """Return the folder name of the checkpoint after `step` optimizer steps."""
    return f"step-{step:08d}"


class _Inside:
    """File or folder inside the `folder` of its owner."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, owner: "RunPaths | SweepPaths", _: object) -> Path:
        return owner.folder / self.name


@dataclass(frozen=True)
class RunPaths:
    """Files of one run."""

    folder: Path

    @property
    def is_run(self) -> bool:
        """True if the folder has a record or a plan."""
        return self.record.exists() or self.plan.exists()

    config = _Inside("config.yaml")
    """Resolved configuration for people. No code reads it."""
    plan = _Inside("plan.json")
    """Plan that the worker executes."""
    record = _Inside("record.json")
    metrics = _Inside("metrics.jsonl")
    """Training curve, one JSON object per line."""
    attempts = _Inside("attempts.jsonl")
    """One JSON object per line for each start of a worker."""
    log = _Inside("train.log")

    def rank_log(self, rank: int) -> Path:
        """Return the path of the output of a rank other than 0."""
        return self.folder / f"rank_{rank}.log"

    def rank_failure(self, rank: int) -> Path:
        """Return the path of the failure reason of a rank other than 0."""
        return self.folder / f"rank_{rank}.json"

    def dead_rank(self, node: int = 0) -> Path:
        """Return the path of a node's first ended process with exit status, by the agent."""
        return self.folder / (f"dead_rank_{node}.json" if node else "dead_rank.json")

    def node_log(self, node: int) -> Path:
        """Return the path of the output of a node other than 0, without its processes."""
        return self.folder / f"node_{node}.log"

    invitation = _Inside("nodes.json")
    """Address of node 0 for the other nodes, valid during one job."""

    def ticket(self, launcher: str) -> Path:
        """Return the path of the launcher's current or last job."""
        return self.folder / f"{launcher}.json"

    planned_with = _Inside("planned_with.json")
    """Fingerprint of the machine that planned a run for a cluster."""
    checkpoints = _Inside("checkpoints")

    def exported(self, step: int) -> Path:
        """Return the path of the exported model of a checkpoint."""
        return self.checkpoints / checkpoint_name(step) / EXPORT

    receipt = _Inside("sync.json")
    """Data that `eke sync` has sent, and the destination."""
    sync_lock = _Inside(".sync.lock")
    """Lock (flock) of the `eke sync` that sends the run."""
    model = _Inside("model")
    """Link to the newest checkpoint's export, for plain transformers."""
    lock = _Inside(".lock")
    """Lock (flock) of the process that works on the run."""


_WATCHER = ".watcher-"


@dataclass(frozen=True)
class SweepPaths:
    """Files of one sweep."""

    folder: Path

    sweep = _Inside("sweep.json")
    """Overrides, run, outcome and reason of each run of the sweep."""

    def watcher(self, host: str, process: int) -> Path:
        """Return the path of the lock (flock) of a process that supervises the sweep."""
        return self.folder / f"{_WATCHER}{host}-{process}"

    def watchers(self) -> list[Path]:
        """Return the supervisors' lock files, including those of ended processes."""
        return sorted(self.folder.glob(f"{_WATCHER}*"))

    def who_watches(self, lock: Path) -> tuple[str, str]:
        """Return host and process id in the name of a supervisor's lock file."""
        host, _, process = lock.name.removeprefix(_WATCHER).rpartition("-")
        return host, process

    rerun = _Inside("rerun.json")
    """Progress of the newest `rerun=true` (eke.launch.processes.sweep_scheduler)."""

    def launcher(self, name: str) -> Path:
        """Return the folder for the launcher's files of the sweep."""
        return self.folder / name


def user_path(text: str) -> Path:
    """Expand `~` in a user's path if the home folder exists."""
    return Path(os.path.expanduser(text))


def home_folder() -> Path:
    """Return the home folder, or a temporary one for a user id without HOME and passwd entry."""
    home = user_path("~")
    return home if home.is_absolute() else Path(tempfile.gettempdir()) / f"eke-{os.geteuid()}"


def short_path(path: Path) -> str:
    """Return a path on one line, relative to the current folder if inside."""
    relative = os.path.relpath(path)
    return " ".join((str(path) if relative.startswith("..") else relative).split("\n"))


def conf_folder() -> Path:
    """Return the folder with `config.yaml`: installed, or next to `src` in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "conf"
    return installed if installed.is_dir() else package.parents[1] / "conf"


def program() -> str:
    """Return the training command: train.py in a checkout, `eke` when installed."""
    is_checkout = (Path(__file__).resolve().parents[3] / "train.py").is_file()
    return "python train.py" if is_checkout else "eke train"


def source_folder() -> str:
    """Return the folder from which eke is imported."""
    return str(Path(__file__).resolve().parents[2])
