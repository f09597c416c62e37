"""Ranks of a run: gloo collectives on the host, Accelerate settings, and nn.DataParallel."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from eke.common.paths import LOCAL_RANK, RANK, RENDEZVOUS_VARIABLE, WORLD_SIZE
from eke.config.schema import CustomModel, PeerToPeer
from eke.plan.planner import Plan
from eke.plan.record import Outcome
from eke.training.batches.batches import MicroBatch
from eke.training.model.loss import LossFunction
from eke.training.model.model_checks import add_zero_gradients, routed_parents
from eke.training.model.number_formats import Formats

_STOPS = (Outcome.cancelled, Outcome.timeout, Outcome.preempted)
"""Stop requests of a rank, in order of priority."""


@dataclass(frozen=True)
class StepTotals:
    """Totals of one optimizer step over all ranks."""

    num_targets: float
    """Targets of the step, at least 1, since losses are divided by the number. A weighted loss of
    own code returns a count that is not whole."""
    num_samples: int
    num_tokens: int
    stop: Outcome | None = None
    """Stop request that a rank received before this step, if any."""
    samples_of: tuple[int, ...] = ()
    targets_of: tuple[int, ...] = ()
    saved: int = 0
    """Ranks that have written their files of a background save. More than all if one failed."""


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks of its run. A single process does not communicate."""

    rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        """True if this process writes record, metrics, checkpoints, tracker and log."""
        return self.rank == 0

    def totals(self, counts: Iterable[int], stop: Outcome | None, saved: int = 0) -> StepTotals:
        """Return sums of `MicroBatch.counts` and `saved`, and a stop request. Collective."""
        if self.world_size > 1:
            numbers = torch.tensor([*(int(stop is each) for each in _STOPS), saved, *counts])
            dist.all_reduce(numbers)
            *wanted, saved = numbers[: len(_STOPS) + 1].tolist()
            counts = numbers[len(_STOPS) + 1 :].tolist()
            stop = next((each for each, count in zip(_STOPS, wanted, strict=True) if count), None)
        targets, samples, tokens, *of = counts
        of_sources = tuple(of[: len(of) // 2]), tuple(of[len(of) // 2 :])
        return StepTotals(max(1, targets), samples, tokens, stop, *of_sources, saved)

    def sum(self, values: Tensor) -> Tensor:
        """Sum a tensor over all ranks, element by element, on its device. Collective."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def tell(self, value: Any) -> Any:
        """Return the value of rank 0 on every rank. Collective."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks on every rank, in order. Collective."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values


SINGLE_PROCESS = Ranks()


P2P_VARIABLE = "NCCL_P2P_DISABLE"
"""Variable that NCCL reads at the first collective of a process. Source:
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-p2p-disable"""


def join_ranks(plan: Plan) -> Ranks:
    """Join the run's processes by a file or as in torchrun. RuntimeError: Some are missing."""
    planned, kind = plan.ranks, plan.device.kind
    if planned.p2p is PeerToPeer.off:
        os.environ[P2P_VARIABLE] = "1"
    world_size = int(os.environ.get(WORLD_SIZE, "1"))
    if world_size == 1:
        return SINGLE_PROCESS
    if kind == "cuda":
        local = int(os.environ[LOCAL_RANK])
        found = torch.cuda.device_count()
        if local >= found:
            raise RuntimeError(f"no GPU for process {local}; torch sees {found}")
        torch.cuda.set_device(local)
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    rank, meeting = int(os.environ[RANK]), os.environ.get(RENDEZVOUS_VARIABLE)
    limit = timedelta(seconds=planned.timeout_s)  # of each collective
    if meeting:
        dist.init_process_group(backend, f"file://{meeting}", limit, world_size, rank)
    else:
        dist.init_process_group(backend, timeout=limit)
    return Ranks(rank, world_size)


def is_lost_contact(error: BaseException) -> bool:
    """Return whether an exception is only a consequence of another process's failure."""
    # Messages of gloo (RuntimeErrors in torch 2.13) and nccl about a lost peer.
    signs = ("Connection closed by peer", "gloo", "NCCL", "Timed out waiting")
    lost = isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
    return lost or isinstance(error, dist.DistError)


def build_handlers(plan: Plan) -> list[Any]:
    """Return Accelerate's `kwargs_handlers` for ddp, [] for other options."""
    if not plan.ranks.is_ddp:
        return []
    from accelerate import DistributedDataParallelKwargs

    # Buffers of Transformers are constants. Sending them in each forward pass would make ranks with
    # different numbers of micro-batches wait for each other. Gradients are views of the
    # communication buckets, without a second copy.
    return [DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)]


def allow_unused_experts(plan: Plan, model: nn.Module, accelerator: Any) -> None:
    """Let ranks train experts that some micro-batches do not reach. Call it before wrapping.

    DDP detects them after each forward pass. FSDP and ZeRO exchange only gradients that all ranks
    have, so every expert gets one, zero if unreached.
    """
    routed, planned = routed_parents(model), plan.ranks
    if planned.is_ddp and isinstance(plan.config.model, CustomModel):
        # Whether a parameter is used is only known after a backward pass.
        accelerator.ddp_handler.find_unused_parameters = True
    if not routed:
        return
    if planned.is_ddp:
        accelerator.ddp_handler.find_unused_parameters = True
    elif planned.shards_states:
        for parent in routed:
            add_zero_gradients(parent, late=planned.zero_stage == 3)
    if planned.zero_stage == 3:  # gathers such a module at once, with all experts
        from deepspeed.utils import set_z3_leaf_modules

        set_z3_leaf_modules(model, list({type(parent) for parent in routed}))


class LossOnDevice(nn.Module):
    """Model and loss as one module, so that only the loss leaves a device of nn.DataParallel."""

    def __init__(self, model: nn.Module, loss: LossFunction, formats: Formats) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.formats = formats
        self.devices: set[str] = set()
        """Devices of forward passes. The copies share this set."""

    def forward(self, labels: Tensor, sources: Tensor | None = None, **inputs: Tensor) -> Tensor:
        """Return the loss of this device's rows, summed, and its parts, `[1, parts]`."""
        self.devices.add(str(labels.device))
        with self.formats.autocast():
            # The caller has the counts, which are counts of all rows.
            batch = MicroBatch(inputs, labels, 0, 0, 0, sources=sources)
            return self.loss(self.model, batch).reshape(1, -1)


def build_data_parallel(
    plan: Plan, model: nn.Module, loss: LossFunction, formats: Formats
) -> tuple[nn.Module, LossFunction]:
    """Return the module for all devices, and the function from a micro-batch to its loss."""
    module = LossOnDevice(model, loss, formats)
    devices = list(range(plan.batch.devices)) if torch.cuda.is_available() else None
    parallel = nn.DataParallel(module, device_ids=devices)

    def summed(called: nn.Module, batch: MicroBatch) -> Tensor:
        total: Tensor = called(batch.labels, batch.sources, **batch.inputs).sum(0)
        return total

    return parallel, summed
