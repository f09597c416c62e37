"""The processes of one run, and what they tell each other.

The host's own collectives go over gloo, on a GPU machine too: agreeing on counts and on stopping
must not wait for the device. Only gradients and losses travel between devices.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from eke.common.paths import LOCAL_RANK, MEETING, RANK, WORLD_SIZE
from eke.config.schema import PeerToPeer
from eke.plan.record import Outcome

STOPS = (Outcome.cancelled, Outcome.timeout, Outcome.preempted)
"""What a rank may ask for; the first one that any rank asked for counts."""


@dataclass(frozen=True)
class StepTotals:
    """What one optimizer step holds over all ranks."""

    num_targets: int
    num_samples: int
    num_tokens: int
    stop: Outcome | None = None
    """Some rank was asked to stop before this step."""


@dataclass(frozen=True)
class Ranks:
    """This process among those of its run; alone, nothing is sent at all."""

    rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes: record, metrics, checkpoints, tracker, log."""
        return self.rank == 0

    def totals(self, mine: StepTotals) -> StepTotals:
        """Sums over all ranks, in one collective between hosts; every rank must call it."""
        if self.world_size == 1:
            return mine
        asked = [int(mine.stop is stop) for stop in STOPS]
        numbers = torch.tensor([mine.num_targets, mine.num_samples, mine.num_tokens, *asked])
        dist.all_reduce(numbers)
        targets, samples, tokens, *wanted = numbers.tolist()
        stop = next((stop for stop, count in zip(STOPS, wanted, strict=True) if count), None)
        return StepTotals(targets, samples, tokens, stop)

    def sum(self, values: Tensor) -> Tensor:
        """Sum over all ranks, element by element, where `values` lives; every rank must call it."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def tell(self, value: Any) -> Any:
        """What rank 0 says, on every rank."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """One value per rank, on every rank, in the order of ranks."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values


ALONE = Ranks()


P2P_VARIABLE = "NCCL_P2P_DISABLE"
"""NCCL reads it when the first collective of a process begins.
Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-p2p-disable"""


def choose_transport(p2p: PeerToPeer) -> None:
    """Tell NCCL, before this process joins the others, how GPUs may exchange data."""
    if p2p is PeerToPeer.off:
        os.environ[P2P_VARIABLE] = "1"


def join_ranks(kind: str, timeout_s: float) -> Ranks:
    """Meet the other processes of the run.

    Where eke started all of them on one machine, in a file; else as torchrun's environment
    variables say.

    Args:
        kind: `cpu` or `cuda`: what the run computes on.
        timeout_s: seconds after which a collective is given up that some rank keeps away from.

    Raises:
        RuntimeError: the others did not come, or there are fewer GPUs than processes.
    """
    world_size = int(os.environ.get(WORLD_SIZE, "1"))
    if world_size == 1:
        return ALONE
    if kind == "cuda":
        local = int(os.environ[LOCAL_RANK])
        found = torch.cuda.device_count()
        if local >= found:
            raise RuntimeError(f"process {local} has no GPU of its own; this torch sees {found}")
        torch.cuda.set_device(local)
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    rank, meeting = int(os.environ[RANK]), os.environ.get(MEETING)
    limit = timedelta(seconds=timeout_s)
    if meeting:
        dist.init_process_group(backend, f"file://{meeting}", limit, world_size, rank)
    else:
        dist.init_process_group(backend, timeout=limit)
    return Ranks(rank, world_size)


def is_lost_contact(error: BaseException) -> bool:
    """Whether an exception says that another process is gone, not what went wrong there."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(sign in text for sign in LOST_SIGNS)


LOST_SIGNS: Sequence[str] = ("Connection closed by peer", "gloo", "NCCL", "Timed out waiting")
"""How gloo (torch 2.13: plain RuntimeErrors) and nccl say that they wait in vain."""
