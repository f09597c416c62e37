"""Schemas of a batch system: what a run asks it for, and how it is spoken to."""

from dataclasses import dataclass, field
from enum import Enum

from eke.config.schema.limits import at_least, between


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
    """How a cluster wants to be asked for GPUs."""

    gpus_per_node = "gpus_per_node"
    gres = "gres"


@dataclass
class Slurm:
    """A cluster: what its users always type, and how its jobs are started."""

    option: str = "default"
    """The option chosen; set by the option's file."""
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
    """Seconds before the time limit at which a run saves and makes room: one step and one
    checkpoint must fit."""
    max_parallel: int = field(default=256, metadata=at_least(1))
    """Runs of one array at the same time."""
    max_restarts: int = field(default=5, metadata=at_least(0))
    """Times a run may be put back into the queue without a step more than before."""
    poll_s: float = field(default=10.0, metadata=between(0.1, 3600))
    """Seconds between two questions to the scheduler."""
