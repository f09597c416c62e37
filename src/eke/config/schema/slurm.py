"""Schema of the group `slurm`: how a cluster is addressed."""

from dataclasses import dataclass, field
from enum import Enum

from eke.config.schema.fields import at_least, between


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
