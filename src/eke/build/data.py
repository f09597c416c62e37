"""Loaders for training steps and evaluation, from the plan."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from eke.build.batches import Collator, MicroBatch, Order, StepSampler
from eke.build.samples import RandomTokens, Source, pack_windows
from eke.build.tasks import TaskSamples
from eke.corpus import largest_labels, open_corpus, window_length
from eke.plan import Plan
from eke.schema import Lengths, SequenceClassification, Synthetic


@dataclass(frozen=True)
class Data:
    """Samples of one run and how to load them."""

    train: TaskSamples
    evaluation: TaskSamples
    collate: Collator
    plan: Plan
    bytes_are_tokens: bool
    """A loss per token is a loss per byte (document separators counted as one byte)."""

    def train_steps(self, start: int, rank: int = 0) -> Iterator[list[MicroBatch]]:
        """The micro-batches of each optimizer step from `start` on, one list per step.

        Skipped steps cost nothing: order is a function of the step's number.
        """
        batch, steps = self.plan.batch, self.plan.steps
        order = Order(len(self.train), batch.samples_per_step, self.plan.config.seed)
        sampler = StepSampler(order, start, steps.total, batch.per_device, rank, batch.world_size)
        loader = iter(self._loader(self.train, sampler))
        for cut in sampler.cuts():
            yield [next(loader) for _ in cut]

    def eval_loader(self, rank: int = 0) -> "DataLoader[Any]":
        """Evaluation micro-batches, always the same samples in the same order."""
        batch = self.plan.batch
        keys = [(0, index) for index in range(len(self.evaluation))]
        size = batch.eval_per_device
        groups = [keys[at : at + size] for at in range(0, len(keys), size)]
        persistent = self.plan.config.dataloader.persistent
        return self._loader(self.evaluation, groups[rank :: batch.world_size], persistent)

    def _loader(
        self, samples: TaskSamples, batches: Any, persistent: bool = False
    ) -> "DataLoader[Any]":
        config = self.plan.config.dataloader
        return DataLoader(
            samples,  # type: ignore[arg-type]  # torch 2.13 types map-style data as Dataset only
            batch_sampler=batches,
            collate_fn=self.collate,
            num_workers=config.workers,
            pin_memory=self.plan.compute.pin_memory,
            prefetch_factor=config.prefetch,
            persistent_workers=persistent,
            # A loader draws a seed for its workers; from the global generator that would shift
            # dropout after a resume. Samples never use it: they are functions of their numbers.
            generator=torch.Generator(),
        )


def build_data(plan: Plan) -> Data:
    """Read the text, or set up the random tokens, of both splits."""
    config = plan.config
    if isinstance(config.data, Synthetic):
        train, evaluation = (_random(plan, split) for split in (0, 1))
    else:
        train, evaluation = _windows(plan)
    # A causal model never sees what comes after a token, and padding comes last.
    bidirectional = config.model.family in ("bert", "t5")
    ragged = isinstance(config.data, Synthetic) and config.data.lengths is not Lengths.fixed
    return Data(
        train=TaskSamples(train, config),
        evaluation=TaskSamples(evaluation, config),
        collate=Collator(needs_mask=bidirectional and ragged),
        plan=plan,
        bytes_are_tokens=not isinstance(config.data, Synthetic)
        and config.task.option in ("causal_lm", "seq2seq_lm"),
    )


def _random(plan: Plan, split: int) -> Source:
    config = plan.config
    assert isinstance(config.data, Synthetic)
    labels = config.task.num_labels if isinstance(config.task, SequenceClassification) else 2
    count = plan.steps.num_eval_samples if split else plan.steps.num_train_samples
    return RandomTokens(
        config.data, window_length(config), config.model.vocab_size, labels, count, split
    )


def _windows(plan: Plan) -> tuple[Source, Source]:
    config, steps = plan.config, plan.steps
    corpus = open_corpus(config)
    assert corpus is not None
    if isinstance(config.task, SequenceClassification):
        labels = largest_labels(corpus, config.task.num_labels)
    else:
        labels = sorted({piece.label for piece in corpus.pieces()})
    length = window_length(config)
    return (
        pack_windows(corpus.train, length, labels, steps.num_train_samples),
        pack_windows(corpus.evaluation, length, labels, steps.num_eval_samples),
    )
