"""The loops of others over the same model, weights, optimizer, clipping and samples: see loops.py.

Their samples lie ready in memory and are collated by their own loaders, in the order of eke's.
"""

import copy
import itertools
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from loops import IN_MEMORY, LOG_EVERY, from_pipeline
from torch.utils.data import DataLoader

from eke.training.batches.batches import MicroBatch
from eke.training.loop.training_state import TrainingState
from eke.training.optimizer.build_optimizer import build_optimizer

Sample = dict[str, torch.Tensor]


def ready_samples(job: TrainingState) -> list[Sample]:
    """Those of the first batches of the job."""
    return samples_of(itertools.islice(from_pipeline(job), IN_MEMORY))


def samples_of(batches: Iterable[MicroBatch]) -> list[Sample]:
    """Their rows one by one, as a dataset for others' loaders has them."""
    columns = ({**batch.inputs, "labels": batch.labels} for batch in batches)
    return [
        dict(zip(each, row, strict=True))
        for each in columns
        for row in zip(*each.values(), strict=True)
    ]


def make_loader(job: TrainingState) -> "DataLoader[Any]":
    """PyTorch's loader over ready samples, with what it collates by default."""
    dataset: Any = ready_samples(job)  # torch 2.13 types map-style data as Dataset only
    return DataLoader(dataset, batch_size=job.plan.batch.per_device)


def from_loader(job: TrainingState) -> Iterator[MicroBatch]:
    """What a loop written by hand has: PyTorch's loader, gone round for ever."""
    loader = make_loader(job)
    while True:
        for batch in loader:
            labels = batch.pop("labels")
            yield MicroBatch(batch, labels, len(labels), len(labels), 0)


def constant_rate(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """A schedule that is stepped and changes nothing."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)


class Accelerated:
    """The loop of Accelerate's documentation, over a copy of the job's model.

    Source: huggingface.co/docs/accelerate, "Performing gradient accumulation with Accelerate", and
    `Accelerator.clip_grad_norm_`.
    """

    def __init__(self, job: TrainingState) -> None:
        self.max_norm = job.plan.config.train.max_grad_norm
        self.accelerator = Accelerator()
        model = copy.deepcopy(job.bare_model)
        optimizer = build_optimizer(job.plan, model)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, make_loader(job), constant_rate(optimizer)
        )
        self.losses: list[torch.Tensor] = []
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
                self.losses.append(loss.detach())
                yield

    def advance(self, num_steps: int) -> None:
        """Train."""
        for _ in range(num_steps):
            next(self.steps)

    def first_loss(self) -> float:
        """Mean of the first steps."""
        return torch.stack(self.losses[:LOG_EVERY]).mean().item()


class StockTrainer:
    """transformers.Trainer over a copy of the job's model, which waits after each step.

    It owns its loop; so that it can be paused, it trains in a thread of its own, and only while
    somebody waits for it in `advance`.
    """

    def __init__(self, job: TrainingState, num_steps: int) -> None:
        self.may_go, self.has_done = threading.Semaphore(0), threading.Semaphore(0)
        self.trainer = make_trainer(job, num_steps, self._on_step_end)
        self.closed = False
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._train, daemon=True)

    def _train(self) -> None:
        self.may_go.acquire()
        try:
            self.trainer.train()
        except BaseException as error:  # else whoever waits would wait for ever
            self.failure = error
        self.has_done.release()

    def _on_step_end(self) -> bool:
        """Trainer has done a step; returns whether it is to stop."""
        self.has_done.release()
        self.may_go.acquire()
        return self.closed

    def advance(self, num_steps: int) -> None:
        """Train."""
        if self.thread.ident is None:
            self.thread.start()
        for _ in range(num_steps):
            self.may_go.release()
            self.has_done.acquire()
            if self.failure:
                raise self.failure

    def first_loss(self) -> float:
        """Mean of the first steps, as Trainer has logged it."""
        return float(self.trainer.state.log_history[0]["loss"])

    def close(self) -> None:
        """End the thread."""
        self.closed = True
        if self.thread.ident is not None:
            self.may_go.release()
            self.thread.join()


def make_trainer(job: TrainingState, num_steps: int, on_step_end: Any) -> Any:
    """A transformers.Trainer over a copy of the job's model.

    Args:
        job: model, optimizer, samples and clipping.
        num_steps: how long it is to train at most.
        on_step_end: called after each step; what is true ends the training.
    """
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
    from transformers.utils import logging

    class Steps(TrainerCallback):  # type: ignore[misc]  # transformers 5.23: no types
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop |= on_step_end()

    logging.set_verbosity_error()
    model = copy.deepcopy(job.bare_model)
    optimizer = build_optimizer(job.plan, model)
    arguments = TrainingArguments(
        output_dir=str(job.paths.folder / "trainer"),
        max_steps=num_steps,
        per_device_train_batch_size=job.plan.batch.per_device,
        max_grad_norm=job.plan.config.train.max_grad_norm,
        logging_steps=LOG_EVERY,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        train_sampling_strategy="sequential",
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=ready_samples(job),
        optimizers=(optimizer, constant_rate(optimizer)),
    )
    trainer.remove_callback(PrinterCallback)  # it prints every log line
    trainer.add_callback(Steps)
    return trainer
