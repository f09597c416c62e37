"""Data loaders of training and evaluation samples."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch.utils.data import DataLoader

from eke.config.schema import CustomData, CustomModel, Packing, Synthetic
from eke.data.preparation.untrusted import load
from eke.data.sources import MixtureSampler
from eke.models.checkpoints.architecture import router_loss
from eke.models.families import family_of
from eke.models.sizes import is_ragged
from eke.plan.planner import Plan
from eke.training.batches.batches import (
    Collator,
    LongestSamples,
    MicroBatch,
    SampleOrder,
    cut_step,
    prefetch_in_groups,
)
from eke.training.batches.tasks import (
    Key,
    MixSamples,
    PackedSamples,
    TaskSamples,
    chat_manifest,
    is_packed,
    open_split,
)
from eke.training.custom.outputs import build_count, has_own_loss
from eke.training.custom.samples import OwnCollator, OwnSamples, open_own
from eke.training.model.build_model import model_configuration
from eke.training.model.loss import build_shift, is_sparse


def build_collator(plan: Plan, left: bool = False) -> Collator:
    """Return the plan's collator, with left padding if `left`."""
    config = plan.config
    multiple = config.data.pad_to_multiple_of or 1
    padded = is_ragged(config) or multiple > 1
    return Collator(
        # Causal attention ignores trailing padding, but the router loss counts it.
        needs_mask=padded
        and not is_packed(config)
        and (not family_of(config).is_decoder or router_loss(config) is not None),
        pad=plan.vocabulary.pad,
        multiple=multiple,
        left=left,
        padding_free=config.data.packing is Packing.padding_free,
        sparse=is_sparse(plan),
        shift=build_shift(plan),
        types=plan.vocabulary.has_types
        and (
            isinstance(config.model, CustomModel)
            or getattr(model_configuration(plan), "type_vocab_size", 0) > 1
        ),
        num_sources=len(plan.sources),
        shorten=plan.probe and is_ragged(config) and not is_packed(config),
        count=build_count(plan) if has_own_loss(plan) else None,
    )


_Samples = TaskSamples | PackedSamples | MixSamples | LongestSamples | OwnSamples


@dataclass
class TrainingData:
    """Samples of a run and their loaders."""

    train: _Samples
    evaluation: _Samples
    collate: Collator | OwnCollator
    plan: Plan
    sums: Counter[str] = field(default_factory=Counter)
    """Sums over this rank's training micro-batches so far."""
    loading: Any = None
    """Iterator over training micro-batches, which owns the loader processes."""
    eval_loading: "DataLoader[Any] | None" = None
    """Loader that evaluations reuse if its processes persist."""
    pinned: bool | None = None
    """True if the first micro-batch was in page-locked memory. None before it."""

    @property
    def sequences_per_row(self) -> float | None:
        """Mean number of sequences per row in training. None without packing."""
        return self.sums["sequences"] / self.sums["rows"] if self.sums["sequences"] else None

    @property
    def padding_frac(self) -> float | None:
        """Fraction of padding in training. None before the first batch."""
        return 1 - self.sums["tokens"] / self.sums["positions"] if self.sums["positions"] else None

    @property
    def bytes_are_tokens(self) -> bool:
        """True if a loss per token is a loss per byte. A document separator counts as a byte."""
        config = self.plan.config
        text = self.plan.vocabulary.is_bytes and not isinstance(config.data, Synthetic)
        return text and config.targets.is_generated

    def train_steps(
        self, start: int, rank: int = 0, even: bool = False
    ) -> Iterator[list[MicroBatch]]:
        """Yield the micro-batches of each step from `start` on, equally many per rank if `even`."""
        batch, total, order = self.plan.batch, self.plan.steps.total, self.order()
        size, world_size = batch.per_device * batch.devices, batch.world_size
        every = (cut_step(keys, size, rank, world_size) for keys in order.steps(start, total))
        self.loading = iter(self._loader(self.train, chain.from_iterable(every), False))
        several = not self.plan.config.dataloader.workers
        batches = prefetch_in_groups(self.loading) if several else self.loading
        for step in range(start, total):
            num_groups = -(-order.size_of(step) // size)
            made = [next(batches) for _ in range(rank, num_groups, world_size)]
            if made and self.pinned is None:
                self.pinned = made[0].tensors[0].is_pinned()
            for each in made:
                self.sums.update(
                    tokens=each.num_tokens,
                    positions=each.num_positions,
                    sequences=each.num_sequences,
                    rows=each.size.rows,
                    skipped=each.num_skipped,
                )
            missing = -(-num_groups // world_size) - len(made)
            yield made + self.placeholders(missing if even else 0)

    def order(self) -> SampleOrder:
        """Return the samples of each step."""
        plan, lengths = self.plan, None
        if plan.config.data.length_grouping:
            lengths = self.train.lengths()
            if (lengths == lengths[0]).all():
                lengths = None
        how = plan.batch.samples_per_step, plan.config.seed, lengths
        is_stream = plan.config.data.is_stream
        if not isinstance(self.train, MixSamples):
            return SampleOrder(len(self.train), *how, is_stream=is_stream)
        parts, shares = self.train.parts, tuple(each.share for each in plan.sources)
        streams = tuple(part.is_stream for part in parts)
        draws = MixtureSampler(tuple(map(len, parts)), shares, plan.config.seed, streams)
        return SampleOrder(plan.steps.num_train_samples, *how, draws, is_stream)

    def longest_step(self, start: int) -> int:
        """Return the first step from `start` on whose longest micro-batch is the longest of all."""
        if not is_ragged(self.plan.config) or self.plan.config.data.is_stream:
            return start
        order, lengths, batch = self.order(), self.train.lengths(), self.plan.batch
        free = self.plan.config.data.packing is Packing.padding_free
        longest, best = -1, start
        for step, keys in enumerate(order.steps(start, self.plan.steps.total), start):
            groups = cut_step(keys, batch.per_device * batch.devices)
            each = [lengths[[index for _, index in group]] for group in groups]
            most = max(found.sum() if free else found.max() * len(found) for found in each)
            if most > longest:
                longest, best = most, step
        return best

    def placeholders(self, count: int) -> list[MicroBatch]:
        """Return placeholders without gradient, samples or tokens."""
        if not count:
            return []
        samples = self.evaluation if self.plan.config.data.is_stream else self.train
        first: Any = samples[0, 0]
        return [self.collate([first]).without_targets()] * count

    def eval_batches(self, rank: int = 0, even: bool = False) -> Iterator[MicroBatch]:
        """Yield evaluation micro-batches of one source each, equally many per rank if `even`."""
        batch, samples = self.plan.batch, self.evaluation
        size, world_size = batch.eval_per_device * batch.devices, batch.world_size
        groups: list[list[Key]] = []
        first = 0
        for part in samples.parts if isinstance(samples, MixSamples) else (samples,):
            keys = [(0, index) for index in range(first, first + len(part))]
            groups += [keys[at : at + size] for at in range(0, len(keys), size)]
            first += len(part)
        mine, loader = groups[rank::world_size], self.eval_loading
        if loader is None:
            persistent = self.plan.config.dataloader.persistent
            loader = self._loader(self.evaluation, mine, persistent)
            if persistent:  # processes end with the loader
                self.eval_loading = loader
        yield from loader
        missing = -(-len(groups) // world_size) - len(mine)
        yield from self.placeholders(missing if even else 0)

    def _loader(self, samples: _Samples, batches: Any, persistent: bool) -> "DataLoader[Any]":
        config = self.plan.config.dataloader
        return DataLoader(
            samples,  # type: ignore[arg-type]  # torch 2.13 types map-style data as Dataset only
            batch_sampler=batches,
            collate_fn=self.collate,
            num_workers=config.workers,
            pin_memory=self.plan.compute.pin_memory,
            prefetch_factor=config.prefetch,
            persistent_workers=persistent,
            # A loader draws a seed for its workers. From the global generator it would change
            # dropout after resuming. Samples do not use it: they are functions of their numbers.
            generator=torch.Generator(),
        )


def build_data(plan: Plan, left: bool = False) -> TrainingData:
    """Return samples of both splits. ConfigError or RunError: They do not match the plan."""
    if isinstance(plan.config.data, CustomData):
        return TrainingData(*open_own(plan), plan)
    open_samples = LongestSamples if plan.probe else open_split
    train, evaluation = (open_samples(plan, evaluation) for evaluation in (False, True))
    return TrainingData(train, evaluation, build_collator(plan, left), plan)


def load_plan_tokenizer(plan: Plan) -> Any:
    """Load the tokenizer with the settings of training, to save it with a model. None for bytes."""
    if plan.vocabulary.is_bytes:
        return None
    from transformers import AutoTokenizer

    tokenizer = load(AutoTokenizer, plan.vocabulary.tokenizer)
    if plan.vocabulary.pad_is_eos:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(plan.vocabulary.pad)
    if chat := chat_manifest(plan):
        own = tokenizer.chat_template  # a dict by name if there are several
        if chat.chat_template != (own.get("default") if isinstance(own, dict) else own):
            tokenizer.chat_template = chat.chat_template
    return tokenizer
