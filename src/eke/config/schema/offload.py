"""Schema of what lives outside the device's memory."""

from dataclasses import dataclass, field
from enum import Enum

from eke.config.schema.limits import between


class WeightsPlace(Enum):
    """Where the weights that the model computes with wait for their turn."""

    device = "device"
    host = "host"
    disk = "disk"


@dataclass
class Offload:
    """Which parts of the training state wait in host memory or on a disk."""

    option: str = "none"
    """The option chosen; set by the option's file."""


@dataclass
class NvmeOffload(Offload):
    """Optimizer state in files on a local disk, read and written in every step."""

    path: str = "???"
    """Folder on a local NVMe disk; the run's files in it are removed when the run ends."""
    weights: WeightsPlace = WeightsPlace.device
    """Where the weights wait that the model computes with: on the device, in host memory
    (as in params_cpu), or on the disk as well (refused: DeepSpeed 0.19 fails)."""
    piece_numbers: int = field(default=100_000_000, metadata=between(2**18, 10**9))
    """Numbers of one process that are updated at a time, 4 bytes each; host memory holds four such
    buffers (DeepSpeed's sub_group_size; 1e9, its default, takes 16 GB)."""
    block_bytes: int = field(default=2**20, metadata=between(2**12, 2**30))
    """Bytes of one read or write (DeepSpeed's aio.block_size, its default)."""
    queue_depth: int = field(default=8, metadata=between(1, 1024))
    """Reads or writes under way at a time (DeepSpeed's aio.queue_depth, its default)."""
    threads: int = field(default=1, metadata=between(1, 64))
    """Threads that share the transfer of one tensor (DeepSpeed's aio.intra_op_parallelism, its
    default)."""


OFFLOADS: dict[str, type] = {"memory": Offload, "nvme": NvmeOffload}
"""Schema name -> class."""
