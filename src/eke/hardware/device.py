"""What eke knows about a device: facts with a source, and nothing where there is none."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One kind of device a run can be planned for, and how many of it there are."""

    kind: str
    """`cuda` or `cpu`: torch's device type."""
    name: str
    """As the vendor's driver, or the operating system, calls it."""
    count: int = 1
    """Devices of this kind that may be used."""
    memory_bytes: int | None = None
    """Memory of one device; for a CPU what this process may use (cgroup limit included)."""
    available_bytes: int | None = None
    """What of it others have left when it was looked at; None where that does not count: for a run
    that starts later, and in the plan of a run on a GPU, which it has to itself."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability; None for a CPU."""
    peak_flops: tuple[tuple[str, float], ...] = ()
    """Dense datasheet peak in FLOP/s by format: `float32`, `tf32`, `float16`, `bfloat16`."""
    memory_bytes_per_s: float | None = None
    """Datasheet bandwidth of its own memory; None where none is published, as for a CPU."""
    link_bytes_per_s: float | None = None
    """Datasheet bandwidth of its NVLinks, both directions together; None where it has none."""
    host_bytes_per_s: float | None = None
    """Of its PCI Express slot with 16 lanes, in one direction."""
    network_bytes_per_s: float | None = None
    """Of the network adapters in the machine that it is usually sold in, for one device."""
    source: str = ""
    """Where the peaks come from; empty when there are none."""
    present: bool = True
    """False for a declared device that this machine does not have."""
    note: str = ""
    """How it was found and what to know about it, in one sentence for the plan."""

    def peak(self, dtype: str) -> float | None:
        """Dense peak in FLOP/s for one format, None when unknown."""
        return dict(self.peak_flops).get(dtype)
