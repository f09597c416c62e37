"""The loops that are compared: the same model, weights, optimizer, clipping and loss in each.

They differ in where the batch comes from, and in what they do around the kernels:

    bare         batches that lie ready in memory; no metrics: the floor
    bare_data    the same loop fed by eke's own pipeline: what is left of eke is its loop
    eke          eke's train_step in a Job built from a plan; metrics written every 10 steps
    accelerate   the loop of Accelerate's documentation; samples ready in memory; no metrics
    trainer      transformers.Trainer; samples ready in memory, its own collator, logs likewise
"""

import copy
import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from eke.app import plan_for
from eke.build.batches import MicroBatch
from eke.build.optimizer import build_optimizer
from eke.compose import compose
from eke.paths import RunPaths
from eke.record import metrics
from eke.run.job import Job, build_job
from eke.run.look import closer_look
from eke.run.loop import train_step, write_metrics
from eke.run.meter import HostClock, Meter
from eke.run.stop import StopFlag
from eke.track.tracker import Untracked

LOG_EVERY = 10
"""Steps between two writes of metrics, in eke and in Trainer."""
IN_MEMORY = 512
"""Batches that `bare` goes round, and `accelerate` the samples of."""

Sample = dict[str, torch.Tensor]


def bert(num_layers: int, num_steps: int, width: int = 64, batch: int = 4) -> tuple[str, ...]:
    """Overrides: a BERT with heads 16 wide, sequences of 32 tokens, a label each; dropout is 0."""
    return (
        "model=tiny_bert",
        f"model.num_hidden_layers={num_layers}",
        f"model.hidden_size={width}",
        f"model.num_attention_heads={width // 16}",
        f"model.intermediate_size={4 * width}",
        "task=sequence_classification",
        "data=synthetic",
        "data.seq_len=32",
        "data.num_samples=8192",
        f"batch.per_device={batch}",
        "optimizer=adamw_fused",
        "schedule=constant",
        "schedule.warmup_frac=0",
        f"train.steps={num_steps}",
    )


def make_job(folder: Path, *overrides: str, hardware: str = "cpu") -> Job:
    """A job of eke, ready to train, on the CPU unless told otherwise."""
    log_every = f"train.log_every={LOG_EVERY}"
    where = f"hardware={hardware}"
    plan = plan_for(compose([*overrides, log_every, "tracker=none", where]), False)
    meter = Meter(HostClock(), 0, timed_from=0)
    job = build_job(plan, RunPaths(folder), 0, StopFlag(), Untracked(), meter, {})
    job.model.train()
    return job


class Bare:
    """The loop one writes by hand, over a copy of the job's model."""

    def __init__(self, job: Job, batches: Iterator[MicroBatch]) -> None:
        self.batches: Iterator[Any] = batches
        self.autocast = job.formats.autocast
        self.model = copy.deepcopy(job.bare_model)
        self.parameters = list(self.model.parameters())
        self.optimizer = build_optimizer(job.plan, self.model)
        max_norm = job.plan.config.train.max_grad_norm
        assert max_norm is not None
        self.max_norm = max_norm
        self.loss = torch.zeros(())

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
            self.loss = loss.detach()

    def last_loss(self) -> float:
        """Of the last step."""
        return self.loss.item()


def from_memory(job: Job) -> Iterator[MicroBatch]:
    """The first batches of the job, prepared before and on its device, for ever."""
    batches = itertools.islice(from_pipeline(job), IN_MEMORY)
    return itertools.cycle([batch.to(job.device) for batch in batches])


def from_pipeline(job: Job) -> Iterator[MicroBatch]:
    """The job's batches, each prepared when it is asked for."""
    for cut in job.data.train_steps(0):
        yield from cut


def samples_of(batches: Iterable[MicroBatch]) -> list[Sample]:
    """Their rows one by one, as a dataset for others' loaders has them."""
    columns = ({**batch.inputs, "labels": batch.labels} for batch in batches)
    return [
        dict(zip(each, row, strict=True))
        for each in columns
        for row in zip(*each.values(), strict=True)
    ]


def constant_rate(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """A schedule that is stepped and changes nothing."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)


class Accelerated:
    """The loop of Accelerate's documentation, over a copy of the job's model.

    Source: huggingface.co/docs/accelerate, "Performing gradient accumulation with Accelerate", and
    `Accelerator.clip_grad_norm_`. The same samples in the same order as eke's.
    """

    def __init__(self, job: Job) -> None:
        self.max_norm = job.plan.config.train.max_grad_norm
        self.accelerator = Accelerator()
        model = copy.deepcopy(job.bare_model)
        optimizer = build_optimizer(job.plan, model)
        samples = samples_of(itertools.islice(from_pipeline(job), IN_MEMORY))
        dataset: Any = samples  # torch 2.13 types map-style data as Dataset only
        loader = DataLoader(dataset, batch_size=job.plan.batch.per_device)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader, constant_rate(optimizer)
        )
        self.loss = torch.zeros(())
        self.steps = self.train()

    def train(self) -> Iterator[None]:
        """The loop, paused after each step."""
        accelerator, model, optimizer = self.accelerator, self.model, self.optimizer
        while True:
            for batch in self.loader:
                with accelerator.accumulate(model):
                    output = model(**batch)
                    loss = output.loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), self.max_norm)
                    optimizer.step()
                    self.scheduler.step()
                    optimizer.zero_grad()
                self.loss = loss.detach()
                yield

    def advance(self, num_steps: int) -> None:
        """Train."""
        for _ in range(num_steps):
            next(self.steps)

    def last_loss(self) -> float:
        """Of the last step."""
        return self.loss.item()


class Eke:
    """The loop of eke from the first step on: `eke.run.loop.train` between two evaluations."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.batches: Iterator[Any] = job.data.train_steps(0)
        self.done = 0

    def advance(self, num_steps: int) -> None:
        """Train."""
        for step in range(self.done, self.done + num_steps):
            with closer_look(self.job, step):
                train_step(self.job, self.batches, step)
            if (step + 1) % LOG_EVERY == 0:
                write_metrics(self.job)
        self.done += num_steps

    def last_loss(self) -> float:
        """Of the last step written."""
        rows, _ = metrics.read_rows(self.job.paths.metrics)
        return float(rows[-1][metrics.LOSS])


def run_trainer(job: Job, num_steps: int, on_step_end: Callable[[int], None]) -> None:
    """Train a copy of the job's model with transformers.Trainer.

    Trainer owns its loop; who wants to measure it, or to take turns, does so in `on_step_end`. It
    is called with the number of steps done.
    """
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
    from transformers.utils import logging

    class Steps(TrainerCallback):  # type: ignore[misc]  # transformers 5.23: no types
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            on_step_end(state.global_step)

    logging.set_verbosity_error()
    model = copy.deepcopy(job.bare_model)
    optimizer = build_optimizer(job.plan, model)
    samples = [job.data.train[0, index] for index in range(len(job.data.train))]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=num_steps,
            per_device_train_batch_size=job.plan.batch.per_device,
            max_grad_norm=job.plan.config.train.max_grad_norm,
            logging_steps=LOG_EVERY,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(
            model,
            arguments,
            train_dataset=samples,
            optimizers=(optimizer, constant_rate(optimizer)),
        )
        trainer.remove_callback(PrinterCallback)  # it prints every log line
        trainer.add_callback(Steps)
        trainer.train()
