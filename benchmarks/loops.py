"""The loops that are compared: the same model, weights, optimizer, clipping and loss in each.

They differ in where the batch comes from, and in what they do around the kernels:

    bare         batches that lie ready in memory; no metrics: the floor
    bare_data    the same loop fed by eke's own pipeline: what is left of eke is its loop
    hand         the same loop fed by PyTorch's DataLoader; samples ready in memory
    eke          eke's train_step in a Job built from a plan; metrics written every 10 steps
    accelerate   the loop of Accelerate's documentation; loader and samples as in `hand`
    trainer      transformers.Trainer; samples ready in memory, its own collator, logs likewise

The last two, and the loader, are in library_loops.py.
"""

import copy
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from eke.common.paths import RunPaths
from eke.config.compose import compose
from eke.plan.record import metrics
from eke.results.trackers.tracker import Untracked
from eke.training.batches.batches import MicroBatch
from eke.training.loop.loop import train_step, write_metrics
from eke.training.loop.meter import Clock, Meter
from eke.training.loop.stop import StopFlag
from eke.training.loop.training_state import TrainingState
from eke.training.observe.observe_run import profile_step
from eke.training.optimizer.build_optimizer import build_optimizer
from eke.workflows.planning import plan_for

LOG_EVERY = 10
"""Steps between two writes of metrics, in eke and in Trainer."""
IN_MEMORY = 512
"""Batches that `bare` goes round, and others the samples of."""


class Loop(Protocol):
    """A loop that trains as many steps as it is told to."""

    def advance(self, num_steps: int) -> None:
        """Train."""

    def first_loss(self) -> float:
        """Mean of the first LOG_EVERY steps; some know it only after one more."""


def check_same_work(*loops: Loop, within: float = 1e-5) -> None:
    """Train some steps; from the same weights, batches and dropout all must have the same loss.

    Weights are not compared: those without a gradient but for rounding (BERT's key biases) move by
    the learning rate in Adam, in a direction that is chance.

    Args:
        loops: none of which has trained yet.
        within: how far off they may be, relative to the first one's loss.

    Raises:
        SystemExit: they are further, so that comparing their times would mean nothing.
    """
    for loop in loops:
        torch.manual_seed(0)
        loop.advance(LOG_EVERY + 1)
    losses = [loop.first_loss() for loop in loops]
    if not all(abs(loss - losses[0]) <= within * abs(losses[0]) for loss in losses):
        names = ", ".join(type(loop).__name__ for loop in loops)
        raise SystemExit(f"the loops computed different losses ({names}): {losses}")


BERT_WORKLOAD = "BERT, 32 bytes of text a sequence, fp32, one thread, fused AdamW, clipping at 1.0"


def bert(num_layers: int, num_steps: int, width: int = 64, batch: int = 4) -> tuple[str, ...]:
    """Overrides: a BERT with heads 16 wide, 32 bytes of a text and their label; without dropout."""
    return (
        "model=tiny_bert",
        f"model.num_hidden_layers={num_layers}",
        f"model.hidden_size={width}",
        f"model.num_attention_heads={width // 16}",
        f"model.intermediate_size={4 * width}",
        "task=sequence_classification",
        "data=python_source",
        "data.seq_len=32",
        f"batch.per_device={batch}",
        "optimizer=adamw_fused",
        "schedule=constant",
        "schedule.warmup_frac=0",
        f"train.steps={num_steps}",
    )


def make_job(folder: Path, *overrides: str, hardware: str = "cpu") -> TrainingState:
    """A job of eke, ready to train, on the CPU unless told otherwise."""
    log_every = f"train.log_every={LOG_EVERY}"
    where = f"hardware={hardware}"
    plan = plan_for(compose([*overrides, log_every, "tracker=none", where]), False)
    meter = Meter(Clock(), 0, timed_from=0)
    job = TrainingState(plan, RunPaths(folder), 0, StopFlag(), Untracked(), meter, {})
    job.model.train()
    return job


class Bare:
    """The loop one writes by hand, over a copy of the job's model."""

    def __init__(self, job: TrainingState, batches: Iterator[MicroBatch]) -> None:
        self.batches: Iterator[Any] = batches
        self.autocast = job.formats.autocast
        self.model = copy.deepcopy(job.bare_model)
        self.parameters = list(self.model.parameters())
        self.optimizer = build_optimizer(job.plan, self.model)
        max_norm = job.plan.config.train.max_grad_norm
        assert max_norm is not None
        self.max_norm = max_norm
        self.losses: list[torch.Tensor] = []

    def advance(self, num_steps: int) -> None:
        """Train."""
        for _ in range(num_steps):
            batch = next(self.batches)
            with self.autocast():
                logits = self.model(**batch.inputs).logits
                loss = F.cross_entropy(logits.flatten(0, -2), batch.labels.flatten())
            loss.backward()  # type: ignore[no-untyped-call]  # torch 2.13
            nn.utils.clip_grad_norm_(self.parameters, self.max_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.detach())

    def first_loss(self) -> float:
        """Mean of the first steps."""
        return torch.stack(self.losses[:LOG_EVERY]).mean().item()


def from_memory(job: TrainingState) -> Iterator[MicroBatch]:
    """The first batches of the job, prepared before and on its device, for ever."""
    batches = itertools.islice(from_pipeline(job), IN_MEMORY)
    return itertools.cycle([batch.to(job.device) for batch in batches])


def from_pipeline(job: TrainingState) -> Iterator[MicroBatch]:
    """The job's batches, each prepared when it is asked for."""
    for cut in job.data.train_steps(0):
        yield from cut


class Eke:
    """The loop of eke (`eke.training.loop.loop.train`), from the first step on."""

    def __init__(self, job: TrainingState) -> None:
        self.job = job
        self.batches: Iterator[Any] = job.data.train_steps(0)
        self.done = 0

    def advance(self, num_steps: int) -> None:
        """Train."""
        for step in range(self.done, self.done + num_steps):
            with profile_step(self.job, step):
                train_step(self.job, self.batches, step)
            if (step + 1) % LOG_EVERY == 0:
                write_metrics(self.job)
        self.done += num_steps

    def first_loss(self) -> float:
        """Mean of the first steps, as they are written."""
        rows, _ = metrics.read_rows(self.job.paths.metrics)
        return sum(float(row[metrics.LOSS]) for row in rows[:LOG_EVERY]) / LOG_EVERY
