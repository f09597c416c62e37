"""Schemas of what surrounds a run and is no part of its identity."""

from dataclasses import dataclass, field
from enum import Enum

from eke.config.schema.limits import between


class TrackerMode(Enum):
    """Whether the tracker talks to a server."""

    offline = "offline"
    online = "online"


@dataclass
class Tracker:
    """Where results are mirrored; metrics.jsonl and record.json are written in any case."""

    option: str = "wandb"
    """The option chosen; set by the option's file."""
    mode: TrackerMode = TrackerMode.offline
    """offline makes no connection at all. W&B only."""
    project: str = "eke"
    """Project the runs are filed under; MLflow's experiment."""
    entity: str | None = None
    """Team or user at W&B; null is the account's default."""
    group: str | None = None
    """Groups the runs of a sweep; null is the sweep's id, if there is one."""
    uri: str | None = None
    """MLflow's tracking URI: a server, or `sqlite:////path`; null is a file in the run folder."""


@dataclass
class Hardware:
    """The machine a run is planned for."""

    option: str = "auto"
    """auto looks at this machine; a device name plans for that device."""
    network_gbit_per_s: float | None = field(default=None, metadata=between(0.1, 100_000))
    """Between machines, all adapters of one machine together; null is what machines with this
    device usually have. For forecasts of time."""


@dataclass
class Paths:
    """Folders."""

    runs: str = "runs"
    """Every run gets a folder in here, named by its identity."""


@dataclass
class Launcher:
    """How the runs of a sweep (-m) are started."""

    cpu_slots: int = field(default=1, metadata=between(1, 1024))
    """Runs at once on a CPU. Two at once slow each other down and claim no speed."""
    runs_per_device: int = field(default=1, metadata=between(1, 64))
    """Runs that share a GPU. More than one claim no speed."""
    fork_server: bool = False
    """Fork the runs of a sweep on this machine from a process that has everything imported: a short
    run starts in a fraction of a second. Runs that need a process of their own get one."""
    detach: bool = False
    """Leave once the runs are submitted; eke status says how far they are. SLURM only."""
