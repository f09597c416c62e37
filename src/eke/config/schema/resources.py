"""Schemas of what surrounds a run: cluster, processes, tracker, paths, sweep, training loop."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from eke.config.schema.fields import Key, OptionGroup, above, at_least, between


@dataclass
class Resources:
    """What one run asks a cluster for. Its processes: distributed.num_processes, one per GPU."""

    time: str = "1:00:00"
    """Time limit as sbatch has it: minutes, H:MM:SS or D-HH:MM:SS."""
    memory: str | None = None
    """Host memory per node, as 64G; null is the cluster's default."""
    cpus: int = field(default=1, metadata=between(1, 4096))
    """Cores for each process."""
    gpus: int | None = field(default=None, metadata=between(0, 1024))
    """GPUs for each process; null is one for a run that is planned for GPUs, else none."""
    partition: str | None = None
    """Where it waits; null is the profile's."""
    account: str | None = None
    """Who pays; null is the profile's."""
    qos: str | None = None
    """Quality of service; null is the profile's."""
    constraint: str | None = None
    """Features that a node must have, as a100&nvlink; null is the profile's."""


class GpuRequest(Enum):
    """How a cluster takes requests for GPUs."""

    gpus_per_node = "gpus_per_node"
    gres = "gres"


@dataclass
class Slurm(OptionGroup):
    """A cluster: what its users always type, and how its jobs are started."""

    option: str = "default"
    partition: str | None = None
    """sbatch --partition, unless resources.partition says another; null is SLURM's default."""
    account: str | None = None
    """sbatch --account, unless resources.account says another."""
    qos: str | None = None
    """sbatch --qos, unless resources.qos says another."""
    constraint: str | None = None
    """sbatch --constraint, unless resources.constraint says another."""
    gpu_request: GpuRequest = GpuRequest.gpus_per_node
    """gpus_per_node asks with --gpus-per-node=N, gres with --gres=gpu:N."""
    gpu_type: str | None = None
    """GPU model as the cluster names it: --gpus-per-node=TYPE:N."""
    options: dict[str, str] = field(default_factory=dict)
    """Any other option of sbatch, by its long name without dashes; one without a value is empty."""
    setup: list[str] = field(default_factory=list)
    """Lines of shell that run before Python starts: module load, export, ulimit."""
    command_prefix: str = ""
    """Before the Python command, as `apptainer exec --nv image.sif`; read by a shell."""
    python: str | None = None
    """Python on the nodes; null is the one that submits."""
    srun: list[str] = field(default_factory=list)
    """Further arguments of srun."""
    grace_s: int = field(default=120, metadata=between(5, 65535))
    """Seconds before the time limit at which a run saves and ends: one step and one
    checkpoint must fit."""
    max_parallel: int = field(default=256, metadata=at_least(1))
    """Runs of one array at the same time."""
    max_restarts: int = field(default=5, metadata=at_least(0))
    """Times a run may be put back into the queue without a step more than before."""
    poll_s: float = field(default=10.0, metadata=between(0.1, 3600))
    """Seconds between two questions to the scheduler."""


class PeerToPeer(Enum):
    """How data travels between the GPUs of one machine."""

    auto = "auto"
    off = "off"


class Exchange(Enum):
    """Which micro-batches of an optimizer step end with an exchange of gradients."""

    auto = "auto"
    last = "last"
    every = "every"


@dataclass
class Distributed(OptionGroup):
    """How many processes train one model, and how they share it."""

    num_processes: int = field(default=1, metadata=Key.ROUNDING | at_least(1))
    """Processes, one per device: the only place that says how many GPUs a run takes (dp: devices
    of one process)."""
    num_nodes: int = field(default=1, metadata=Key.ROUNDING | at_least(1))
    """Machines that share the processes evenly, each with its own devices."""
    timeout_s: float = field(default=1800.0, metadata=Key.NONE | between(1, 86400))
    """Seconds after which a process that waits for another one gives the run up."""
    p2p: PeerToPeer = field(default=PeerToPeer.auto, metadata=Key.ROUNDING)
    """off sends what GPUs exchange through host memory, as if no NVLink were there; for NCCL."""
    deepspeed_config: str | None = field(default=None, metadata=Key.BOTH)
    """A ds_config.json of one's own for zero1, zero2 and zero3: its keys are added to eke's."""

    @property
    def processes_per_node(self) -> int:
        """Processes of the machine with the most; usable before any limit is checked."""
        return -(-self.num_processes // max(1, self.num_nodes))


@dataclass
class FSDP(Distributed):
    """Weights, gradients and optimizer state shared out between the processes."""

    reshard_after_forward: bool = field(default=True, metadata=Key.ROUNDING)
    """Gather each layer's weights once more in the backward pass; false keeps them in between."""
    exchange: Exchange = field(default=Exchange.auto, metadata=Key.ROUNDING)
    """last adds a step's gradients up whole in each process, every only each one's share; auto goes
    by their size."""
    replicas: int = field(default=1, metadata=Key.ROUNDING | at_least(1))
    """Copies of the model, each sharded over num_processes / replicas neighbouring processes."""

    @property
    def shards(self) -> int:
        """Parts of each tensor; usable before any limit is checked."""
        return max(1, self.num_processes // max(1, self.replicas))


DISTRIBUTEDS: dict[str, type] = {"copies": Distributed, "fsdp": FSDP}
"""Schema name -> class."""


class TrackerMode(Enum):
    """Whether the tracker talks to a server."""

    offline = "offline"
    online = "online"


@dataclass
class Tracker(OptionGroup):
    """Where results are mirrored; metrics.jsonl and record.json are written in any case."""

    option: str = "wandb"
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
class LaunchKeys:
    """How the runs of a sweep (-m) are started."""

    cpu_slots: int = field(default=1, metadata=between(1, 1024))
    """Runs at once on a CPU. Two at once slow each other down and claim no speed."""
    runs_per_device: int = field(default=1, metadata=between(1, 64))
    """Runs that share a GPU. More than one claim no speed."""
    prefix: list[str] = field(default_factory=list)
    """Commands of `hydra/launcher=command`, as 'ssh HOST'; each takes one run at a time."""
    detach: bool = False
    """Leave once the runs are submitted; eke status says how far they are. Needs a cluster."""


class Seeds(Enum):
    """Whether the repeats of a configuration share their seed."""

    same = "same"
    per_repeat = "per_repeat"


AUTO_REPEATS = "auto"
"""`sweep.repeats` that the results decide."""


@dataclass
class Sweep:
    """Which runs `-m` makes: rows x zip x product, less what is excluded, in rounds of repeats."""

    product: dict[str, Any] = field(default_factory=dict)
    """Key -> its values, as a list or as written after -m; every combination is a run."""
    rows: dict[str, Any] = field(default_factory=dict)
    """Name -> the overrides of that row, a mapping; the name is shown with the run."""
    zip: dict[str, Any] = field(default_factory=dict)
    """Key -> its values, advanced together: all lists are of one length."""
    exclude: list[str] = field(default_factory=list)
    """Expressions such as `precision=fp16 and model=tiny_t5`; a run that one is true of is left
    out."""
    repeats: str = "1"
    """Runs of each configuration, one of every configuration per round: repeat=0, 1, ... auto:
    rounds until each difference from the baseline is decided."""
    max_repeats: int = field(default=10, metadata=between(3, 100))
    """With repeats=auto: most runs of a configuration; more of them mean a stricter level."""
    resolve: float = field(default=0.05, metadata=between(0.005, 1))
    """With repeats=auto: a configuration whose difference is shown to be smaller stops as the
    same."""
    budget: float | None = field(default=None, metadata=above(0))
    """With repeats=auto: device-hours of the sweep, after which no round begins; null: no limit."""
    seeds: Seeds = Seeds.same
    """`per_repeat`: repeat=0, 1, ... have seed=0, 1, ..., so that three repeats resolve differences
    of the loss; `same`: the repeats of a configuration are one training, timed again."""
    strict: bool = False
    """Start nothing when a rule refuses any of the runs."""

    @property
    def is_auto(self) -> bool:
        """Whether the results decide the number of repeats."""
        return self.repeats == AUTO_REPEATS

    @property
    def rule(self) -> tuple[str, ...]:
        """What decides the number of repeats, and identifies the sweep; empty if it is fixed."""
        return (self.repeats, f"{self.resolve:g}") if self.is_auto else ()

    @property
    def rounds(self) -> int:
        """Most repeats of a configuration."""
        return self.max_repeats if self.is_auto else int(self.repeats)


class Horizon(Enum):
    """For how long what is chosen should be the fastest."""

    steps = "steps"
    steady = "steady"


@dataclass
class RecipeGoal:
    """What an adaptive recipe, and `eke fit`, choose for."""

    horizon: Horizon = Horizon.steps
    """`steps`: for this run, in which compilation has to pay; `steady`: for steps after
    compilation, as benchmarks time them."""


@dataclass
class Engine(OptionGroup):
    """Which training loop runs the plan."""

    option: str = "loop"


@dataclass
class Trainer:
    """What only Hugging Face Trainer has; read with engine=trainer."""

    extra: dict[str, Any] = field(default_factory=dict, metadata=Key.BOTH)
    """Further arguments of TrainingArguments, each set by `trainer.extra.ARGUMENT=VALUE`."""
