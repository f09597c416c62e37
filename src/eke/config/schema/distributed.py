"""Schema of several processes that train one model."""

from dataclasses import dataclass, field
from enum import Enum

from eke.config.schema.limits import at_least, between


class PeerToPeer(Enum):
    """How data travels between the GPUs of one machine."""

    auto = "auto"
    off = "off"


class Exchange(Enum):
    """Which micro-batches of an optimizer step end with an exchange of gradients."""

    last = "last"
    every = "every"


@dataclass
class Distributed:
    """How many processes train one model, and how they share it."""

    option: str = "none"
    """The option chosen; set by the option's file."""
    num_processes: int = field(default=1, metadata=at_least(1))
    """Processes, one per device: the only place that says how many GPUs a run takes (dp: devices
    of one process)."""
    num_nodes: int = field(default=1, metadata=at_least(1))
    """Machines that share the processes evenly, each with its own devices."""
    timeout_s: float = field(default=1800.0, metadata=between(1, 86400))
    """Seconds after which a process that waits for another one gives the run up."""
    p2p: PeerToPeer = PeerToPeer.auto
    """off sends what GPUs exchange through host memory, as if no NVLink were there; for NCCL."""
    deepspeed_config: str | None = None
    """A ds_config.json of one's own for zero1, zero2 and zero3: its keys are added to eke's."""


@dataclass
class FSDP(Distributed):
    """Weights, gradients and optimizer state shared out between the processes."""

    reshard_after_forward: bool = True
    """Gather each layer's weights once more in the backward pass; false keeps them in between."""
    exchange: Exchange = Exchange.last
    """last adds a step's gradients up whole in each process; every keeps only each one's share."""


DISTRIBUTEDS: dict[str, type] = {"copies": Distributed, "fsdp": FSDP}
"""Schema name -> class."""
