"""A loop by hand as torchtitan's, in plain PyTorch: what a good loop is that knows one thing only.

Each layer compiled where a GPU and a compiler are, FSDP2 on this one device for its bf16 copies of
float32 weights, fused AdamW, a compiled cross-entropy, clipping at 1.0. As in Trainer: learning
rate (linear decay from 5e-5), no weight decay, the batches and how often the loss is looked at.
torchtitan: https://github.com/pytorch/torchtitan (`models/llama3/infra/parallelize.py`, `train.py`)
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._triton import has_triton
from torch.utils.data import DataLoader

LR, MAX_NORM = 5e-5, 1.0
"""Trainer's defaults."""

Sample = dict[str, Any]


class Work(Protocol):
    """What of plain_trainer.py's work is read here."""

    @property
    def precision(self) -> str:
        """`bf16`, or `fp32`."""

    @property
    def steps(self) -> int:
        """All of them."""

    @property
    def log_every(self) -> int:
        """Steps between two looks at the loss."""

    @property
    def lr(self) -> float | None:
        """None is Trainer's default."""

    @property
    def samples(self) -> str | None:
        """Samples of somebody else's, which keep their order."""


class Clock(Protocol):
    """Is told of the end of each step."""

    def step_ended(self, is_last: bool) -> None:
        """One more is done."""


def train_by_hand(
    model: nn.Module, samples: list[Sample], batch: int, work: Work, clock: Clock
) -> tuple[list[float], str]:
    """Train; returns the mean losses between two looks, and the optimizer's name."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device).train()
    loss_of = prepare(model, work.precision, device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=work.lr or LR, weight_decay=0.0, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 - n / work.steps)
    losses, seen = [], []
    batches = endless(samples, batch, shuffle=work.samples is None)
    for step, inputs in zip(range(1, work.steps + 1), batches, strict=False):
        ids, labels = (inputs[k].to(device, non_blocking=True) for k in ("input_ids", "labels"))
        loss = loss_of(model(input_ids=ids).logits, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, foreach=True)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
        if step % work.log_every == 0:
            losses.append(torch.stack(seen).mean().item())
            seen.clear()
        clock.step_ended(step == work.steps)
    dist.destroy_process_group()
    return losses, type(optimizer).__name__


def endless(samples: list[Sample], batch: int, shuffle: bool) -> Iterator[Sample]:
    """Batches, epoch after epoch."""
    loader: DataLoader[Sample] = DataLoader(
        samples,  # type: ignore[arg-type]  # torch 2.13: a list has what is asked of a dataset
        batch_size=batch,
        shuffle=shuffle,
        pin_memory=torch.cuda.is_available(),
    )
    return itertools.chain.from_iterable(itertools.repeat(loader))


def prepare(model: nn.Module, precision: str, device: torch.device) -> Callable[..., torch.Tensor]:
    """Compile and share each layer, then the rest; returns the loss to train with."""
    bf16 = torch.bfloat16 if precision == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=torch.float32)
    is_compiled = device.type == "cuda" and has_triton()
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(device.type, (1,))
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    for layer in itertools.chain.from_iterable(lists):
        if is_compiled:
            layer.compile()
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return torch.compile(cross_entropy) if is_compiled else cross_entropy


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """In float32: of classes (batch, classes), or of the next token (batch, length, vocabulary)."""
    if logits.dim() == 3:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())
