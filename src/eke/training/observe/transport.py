"""How the GPUs of a run may exchange data: read from the environment that NCCL reads."""

import os

from eke.config.schema import PeerToPeer
from eke.training.distributed.ranks import P2P_VARIABLE
from eke.training.loop.state import Job


def note_transport(job: Job) -> None:
    """Whether NCCL may use peer-to-peer copies, on each rank; all ranks take part."""
    if job.ranks.world_size == 1 or job.device.type != "cuda":
        return
    values = job.ranks.gather(os.environ.get(P2P_VARIABLE, ""))
    # NCCL takes any number but 0 for a yes.
    switched_off = [value not in ("", "0") for value in values]
    job.effective["nccl_p2p"] = ["off" if off else "auto" for off in switched_off]
    wanted = job.plan.config.distributed.p2p
    if any(off != (wanted is PeerToPeer.off) for off in switched_off):
        found = ", ".join(value or "unset" for value in values)
        job.warn(f"distributed.p2p={wanted.value}, but {P2P_VARIABLE} is {found} on the ranks")
