"""Schemas of the surroundings of a run: cluster, processes, tracker, paths and sweep."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from eke.config.schema.fields import Key, OptionGroup, above, at_least, between


@dataclass
class Resources:
    """Resources of a run on a cluster. See distributed.num_processes for its processes."""

    time: str = "1:00:00"
    """Time limit in sbatch's format. Minutes, H:MM:SS or D-HH:MM:SS."""
    memory: str | None = None
    """Host memory per node, for example 64G. null: the cluster's default."""
    cpus: int = field(default=1, metadata=between(1, 4096))
    """CPU cores per process."""
    gpus: int | None = field(default=None, metadata=between(0, 1024))
    """GPUs per process. null: 1 if the run is planned for GPUs, else 0."""
    partition: str | None = None
    """Partition of the job. null: from the cluster profile."""
    account: str | None = None
    """Account that is charged. null: from the cluster profile."""
    qos: str | None = None
    """Quality of service. null: from the cluster profile."""
    constraint: str | None = None
    """Features required of a node, for example a100&nvlink. null: from the cluster profile."""


class GpuRequest(Enum):
    """Form of GPU requests."""

    gpus_per_node = "gpus_per_node"
    gres = "gres"


@dataclass
class Slurm(OptionGroup):
    """Profile of a cluster: default sbatch options and the way its jobs start."""

    option: str = "default"
    partition: str | None = None
    """Default of resources.partition (sbatch --partition). null: SLURM's default."""
    account: str | None = None
    """Default of resources.account (sbatch --account). null: SLURM's default."""
    qos: str | None = None
    """Default of resources.qos (sbatch --qos). null: SLURM's default."""
    constraint: str | None = None
    """Default of resources.constraint (sbatch --constraint). null: none."""
    gpu_request: GpuRequest = GpuRequest.gpus_per_node
    """Form of GPU requests. gpus_per_node: --gpus-per-node=N. gres: --gres=gpu:N."""
    gpu_type: str | None = None
    """GPU model in the cluster's spelling. Requested as --gpus-per-node=TYPE:N. null: any model."""
    options: dict[str, str] = field(default_factory=dict)
    """Other sbatch options: long name without dashes -> value. The value of a flag is empty."""
    setup: list[str] = field(default_factory=list)
    """Shell lines that run before Python starts. Examples: module load, export, ulimit."""
    command_prefix: str = ""
    """Shell command in front of Python. Example: `apptainer exec --nv image.sif`."""
    python: str | None = None
    """Python on the nodes. null: the Python that submits the job."""
    srun: list[str] = field(default_factory=list)
    """Additional arguments of srun."""
    grace_s: int = field(default=120, metadata=between(5, 65535))
    """Seconds before the time limit to save and end. One step and one checkpoint must fit."""
    max_parallel: int = field(default=256, metadata=at_least(1))
    """Maximum number of jobs of an array that run in parallel."""
    max_restarts: int = field(default=5, metadata=at_least(0))
    """Maximum number of requeues without a new training step."""
    poll_s: float = field(default=10.0, metadata=between(0.1, 3600))
    """Seconds between two queries of the scheduler."""


class PeerToPeer(Enum):
    """Path of data between the GPUs of one node."""

    auto = "auto"
    off = "off"


class GradientSync(Enum):
    """Micro-batches of an optimizer step after which gradients are synchronized."""

    auto = "auto"
    last = "last"
    every = "every"


STAGE = {"zero1": 1, "zero2": 2, "zero3": 3}
"""Option of the group `distributed` -> ZeRO stage."""


@dataclass
class Distributed(OptionGroup):
    """Number of processes that train one model, and their connections."""

    num_processes: int = field(default=1, metadata=Key.ROUNDING | at_least(1))
    """Number of processes, one per device. dp: number of devices of its only process."""
    num_nodes: int = field(default=1, metadata=Key.ROUNDING | at_least(1))
    """Number of nodes. The processes are divided evenly among them."""
    timeout_s: float = field(default=1800.0, metadata=Key.NONE | between(1, 86400))
    """Seconds that a process waits for another one. The run fails afterwards."""
    p2p: PeerToPeer = field(default=PeerToPeer.auto, metadata=Key.ROUNDING)
    """NCCL peer-to-peer transfers. off: send data through host memory, as without NVLink."""
    deepspeed_config: str | None = field(default=None, metadata=Key.BOTH)
    """DeepSpeed configuration file for zero1, zero2 and zero3. Added to eke's. null: none."""

    @property
    def processes_per_node(self) -> int:
        """Largest number of processes on a node. Also valid before limits are checked."""
        return -(-self.num_processes // max(1, self.num_nodes))

    @property
    def zero_stage(self) -> int:
        """ZeRO stage of DeepSpeed, 0 without DeepSpeed."""
        return STAGE.get(self.option, 0)

    @property
    def fsdp(self) -> "FSDP | None":
        """Keys of FSDP, None without FSDP."""
        return self if isinstance(self, FSDP) else None

    @property
    def shards(self) -> int:
        """Shards of the optimizer state, 1 if each process has all of it."""
        return self.num_processes if self.zero_stage else 1

    @property
    def is_ddp(self) -> bool:
        """Whether DDP synchronizes the gradients of model copies."""
        return self.option == "ddp"

    @property
    def is_dp(self) -> bool:
        """Whether one process trains with several devices (DataParallel)."""
        return self.option == "dp"

    @property
    def shards_states(self) -> bool:
        """Whether the optimizer state is sharded among the processes."""
        return self.fsdp is not None or self.zero_stage >= 1

    @property
    def shards_weights(self) -> bool:
        """Whether the weights are sharded among the processes, from initialization on."""
        return self.fsdp is not None or self.zero_stage == 3


@dataclass
class FSDP(Distributed):
    """Weights, gradients and optimizer state sharded among processes."""

    reshard_after_forward: bool = field(default=True, metadata=Key.ROUNDING)
    """Free gathered weights after a layer's forward pass. false: keep them until backward."""
    exchange: GradientSync = field(default=GradientSync.auto, metadata=Key.ROUNDING)
    """Micro-batches after which gradients are synchronized. last: processes accumulate full
    gradients. every: processes accumulate shards. auto: by the size of the gradients."""
    replicas: int = field(default=1, metadata=Key.ROUNDING | at_least(1))
    """Model copies. Each is sharded over num_processes / replicas neighbouring processes."""

    @property
    def shards(self) -> int:
        """Number of shards of each tensor. Also valid before limits are checked."""
        return max(1, self.num_processes // max(1, self.replicas))


class TrackerMode(Enum):
    """Connection of the tracker to its server."""

    offline = "offline"
    online = "online"


@dataclass
class Tracker(OptionGroup):
    """Tracker that receives the results. metrics.jsonl and record.json are always written."""

    option: str = "wandb"
    mode: TrackerMode = TrackerMode.offline
    """Connection to the W&B server. offline: no connection. Other trackers ignore it."""
    project: str = "eke"
    """Project of the runs (MLflow: experiment)."""
    entity: str | None = None
    """W&B team or user. null: the default of the account."""
    group: str | None = None
    """Group of the runs. null: the id of the sweep, if there is one."""
    uri: str | None = None
    """MLflow's tracking URI: a server or `sqlite:////path`. null: mlflow.db in the runs folder."""


@dataclass
class Hardware:
    """Machine for which a run is planned."""

    option: str = "auto"
    """Device name to plan for. auto: this machine."""
    network_gbit_per_s: float | None = field(default=None, metadata=between(0.1, 100_000))
    """Network bandwidth per node in Gbit/s, all adapters together. Used to estimate time. null: the
    usual value for this device."""


@dataclass
class Paths:
    """Folders."""

    runs: str = "runs"
    """Folder of all runs. Each run has a subfolder named by its identity."""


@dataclass
class LaunchKeys:
    """Settings of the launcher that starts the runs of a sweep (-m)."""

    cpu_slots: int = field(default=1, metadata=between(1, 1024))
    """Number of runs at a time on a CPU. With more than one, speeds are not reported."""
    runs_per_device: int = field(default=1, metadata=between(1, 64))
    """Number of runs per GPU. With more than one, speeds are not reported."""
    prefix: list[str] = field(default_factory=list)
    """Prefixes of `hydra/launcher=command`, as 'ssh HOST'. Each starts one run at a time."""
    detach: bool = False
    """Exit after submitting the runs. eke status shows their progress. Requires a cluster."""


class Seeds(Enum):
    """Seeds of the repeats of a configuration."""

    same = "same"
    per_repeat = "per_repeat"


@dataclass
class Sweep:
    """Runs of `-m`: rows x zip x product without excluded runs, in rounds of repeats."""

    product: dict[str, Any] = field(default_factory=dict)
    """Key -> values, as a list or in the syntax of -m. Every combination is a run."""
    rows: dict[str, Any] = field(default_factory=dict)
    """Name -> overrides of a run, as a mapping. Reports show the name."""
    zip: dict[str, Any] = field(default_factory=dict)
    """Key -> values that advance together. All lists have one length."""
    exclude: list[str] = field(default_factory=list)
    """Expressions that exclude runs. Example: `precision=fp16 and model=tiny_t5`."""
    repeats: str = "1"
    """Number of runs of each configuration. Each round runs every configuration once: repeat=0, 1,
    ... auto: run rounds until each difference from the baseline is significant or ruled out."""
    max_repeats: int = field(default=10, metadata=between(3, 100))
    """Maximum number of repeats with repeats=auto. More looks require stronger evidence."""
    resolve: float = field(default=0.05, metadata=between(0.005, 1))
    """Smallest relevant difference with repeats=auto. Configurations below it stop early."""
    budget: float | None = field(default=None, metadata=above(0))
    """Device-hours after which no round starts (repeats=auto). null: no limit."""
    seeds: Seeds = Seeds.same
    """Seeds of the repeats. same: repeats time the same training again. per_repeat: repeat=0, 1,
    ... use seed=0, 1, ..., so three repeats can show differences of the loss."""
    strict: bool = False
    """Start no run if any run of the sweep is rejected."""

    @property
    def is_auto(self) -> bool:
        """True if the results determine the number of repeats."""
        return self.repeats == "auto"

    @property
    def rule(self) -> tuple[str, ...]:
        """Rule for the number of repeats, part of the sweep's identity. Empty if it is fixed."""
        return (self.repeats, f"{self.resolve:g}") if self.is_auto else ()

    @property
    def rounds(self) -> int:
        """Maximum number of repeats of a configuration."""
        return self.max_repeats if self.is_auto else int(self.repeats)


class OptimizeFor(Enum):
    """Training time for which a recipe optimizes."""

    steps = "steps"
    steady = "steady"


@dataclass
class RecipeGoal:
    """Goal of adaptive recipes and `eke fit`."""

    horizon: OptimizeFor = OptimizeFor.steps
    """Time to minimise. steps: this run, with compilation. steady: steps after compilation."""


@dataclass
class Engine(OptionGroup):
    """Training loop that runs the plan."""

    option: str = "loop"

    @property
    def is_trainer(self) -> bool:
        """Whether Hugging Face Trainer runs the steps."""
        return self.option == "trainer"


@dataclass
class Trainer:
    """Settings that only Hugging Face Trainer has. Used with engine=trainer."""

    extra: dict[str, Any] = field(default_factory=dict, metadata=Key.BOTH)
    """Additional TrainingArguments. Set each with `trainer.extra.ARGUMENT=VALUE`."""
