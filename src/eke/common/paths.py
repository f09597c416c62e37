"""Where things are: every file name inside a run folder, and the configuration eke ships with."""

import os
from dataclasses import dataclass
from pathlib import Path

SUPERVISOR = "EKE_SUPERVISOR"
"""Environment variable with the process id of whoever watches over a worker."""

AGENT = "EKE_AGENT"
"""Environment variable with the process id of the agent that started a run's ranks."""

MEETING = "EKE_MEETING"
"""Environment variable with the file in which the ranks of one machine find each other."""

SHARED_DEVICE = "EKE_SHARED_DEVICE"
"""Environment variable that says other runs may use a worker's device at the same time."""

RANK, LOCAL_RANK = "RANK", "LOCAL_RANK"
WORLD_SIZE, LOCAL_WORLD_SIZE = "WORLD_SIZE", "LOCAL_WORLD_SIZE"
"""torchrun's environment variables: number of this process, its number on this machine, and how
many there are, and are on this machine (https://docs.pytorch.org/docs/stable/elastic/run.html)."""


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

    def rank_log(self, rank: int) -> Path:
        """Everything another process than rank 0 printed."""
        return self.folder / f"rank_{rank}.log"

    def rank_failure(self, rank: int) -> Path:
        """Why a process other than rank 0 ended badly."""
        return self.folder / f"rank_{rank}.json"

    def dead_rank(self, node: int = 0) -> Path:
        """Which process of a machine ended first, and how, as the one that started them saw it."""
        return self.folder / (f"dead_rank_{node}.json" if node else "dead_rank.json")

    def node_log(self, node: int) -> Path:
        """What another machine than the first printed; its processes have logs of their own."""
        return self.folder / f"node_{node}.log"

    @property
    def invitation(self) -> Path:
        """Where the other machines of a run find the first one, while a job lasts."""
        return self.folder / "nodes.json"

    def ticket(self, launcher: str) -> Path:
        """The launcher's job that works on the run, or did last."""
        return self.folder / f"{launcher}.json"

    @property
    def planned_with(self) -> Path:
        """Fingerprint of the machine that planned a run for a cluster."""
        return self.folder / "planned_with.json"

    @property
    def checkpoints(self) -> Path:
        """One folder per checkpoint."""
        return self.folder / "checkpoints"

    @property
    def receipt(self) -> Path:
        """What `eke sync` has sent, and where to."""
        return self.folder / "sync.json"

    @property
    def sync_lock(self) -> Path:
        """Held (flock) by the `eke sync` that sends the run."""
        return self.folder / ".sync.lock"

    @property
    def model(self) -> Path:
        """Link to the newest checkpoint's export: what plain transformers loads."""
        return self.folder / "model"

    @property
    def merged(self) -> Path:
        """The model with its adapters merged, where `peft.save_merged` asked for it."""
        return self.folder / "merged"

    @property
    def lock(self) -> Path:
        """Held (flock) by the process that works on the run."""
        return self.folder / ".lock"


_WATCHER = ".watcher-"


@dataclass(frozen=True)
class SweepPaths:
    """The files of one sweep."""

    folder: Path

    @property
    def sweep(self) -> Path:
        """Every cell: overrides, run, verdict and reason."""
        return self.folder / "sweep.json"

    def watcher(self, host: str, process: int) -> Path:
        """Held (flock) by a process that watches over the sweep."""
        return self.folder / f"{_WATCHER}{host}-{process}"

    def watchers(self) -> list[Path]:
        """Those files, also of processes that are gone."""
        return sorted(self.folder.glob(f"{_WATCHER}*"))

    def who_watches(self, lock: Path) -> tuple[str, str]:
        """Host and process id of whom one of them is."""
        host, _, process = lock.name.removeprefix(_WATCHER).rpartition("-")
        return host, process

    @property
    def rerun(self) -> Path:
        """How far its newest `rerun=true` is (eke.launch.processes.sweep_state)."""
        return self.folder / "rerun.json"

    def launcher(self, name: str) -> Path:
        """Folder for the launcher's own files of the sweep."""
        return self.folder / name


def user_path(text: str) -> Path:
    """A path as a user types it: `~` is a home folder, where there is such a one."""
    return Path(os.path.expanduser(text))


def conf_folder() -> Path:
    """The folder with `config.yaml`: in an installed package, else beside `src` in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "conf"
    return installed if installed.is_dir() else package.parents[1] / "conf"


def program() -> str:
    """What starts a training: a checkout has train.py, an installed package only the command."""
    is_checkout = (Path(__file__).resolve().parents[3] / "train.py").is_file()
    return "python train.py" if is_checkout else "eke train"


def source_folder() -> str:
    """Where eke is imported from."""
    return str(Path(__file__).resolve().parents[2])
