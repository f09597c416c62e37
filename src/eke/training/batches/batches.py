"""Micro-batches: collation, sampling order, prefetching, transfer to the device, probe samples."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from eke.common.text import IGNORED, PAD
from eke.config.schema import Packing
from eke.data.sources import MixtureSampler, mix_seed
from eke.models.sizes import is_ragged, most_predicted
from eke.plan.planner import Plan, evaluated, simulated_micro_batches
from eke.plan.planner.lengths import GROUPED_STEPS, MicroBatchShape
from eke.training.batches.sampler import as_label
from eke.training.batches.tasks import Key, Sample, concatenate_samples


@dataclass(frozen=True)
class MicroBatch:
    """Input of one forward pass, with counts on the host."""

    inputs: dict[str, Any]
    """Arguments of the model's forward pass, `input_ids` of shape `[samples, longest]`, or values
    of any type of own data."""
    labels: Any
    """Labels aligned with the logits: `[samples, longest]`, in classification `[samples]`, with
    multiple labels float32 `[samples, classes]`. NaN is IGNORED among numbers. None for own
    data."""
    num_samples: int
    num_targets: int
    """Labels with loss. The loss of a step is the mean over them, or over `loss.per`."""
    num_tokens: int
    """Input and target tokens without padding, 0 for own data."""
    places: Tensor | None = None
    """Indices of labels with loss in the flattened labels, int64. None if all logits are needed."""
    sources: Tensor | None = None
    """True if each label belongs to each source of a mix, `[..., sources]`."""
    samples_of: tuple[int, ...] = ()
    """Samples of each source of a mix."""
    targets_of: tuple[int, ...] = ()
    """Labels with loss of each source of a mix."""
    num_skipped: int = 0
    """Rows of a stream that were skipped before these."""

    @property
    def counts(self) -> tuple[int, ...]:
        """Targets, samples, tokens, samples per source and targets per source."""
        sizes = self.num_targets, self.num_samples, self.num_tokens
        return sizes + self.samples_of + self.targets_of

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors."""
        found = tree_leaves((self.inputs, self.labels, self.places, self.sources))
        return [each for each in found if isinstance(each, Tensor)]

    @property
    def mapping(self) -> dict[str, Any]:
        """All values by key, for own code."""
        return self.inputs if self.labels is None else {**self.inputs, "labels": self.labels}

    @property
    def num_positions(self) -> int:
        """Positions in the model's inputs, including padding."""
        names = ("input_ids", "decoder_input_ids")
        if self.labels is None:
            return 0
        return sum(self.inputs[name].numel() for name in names if name in self.inputs)

    @property
    def size(self) -> MicroBatchShape:
        """Shape: rows and length, 1 for own data."""
        if self.labels is None:
            return MicroBatchShape(max(1, self.num_samples), 1, 1)
        rows, source = self.inputs["input_ids"].shape
        decoder = self.inputs.get("decoder_input_ids")
        return MicroBatchShape(rows, source, source if decoder is None else decoder.shape[1])

    @property
    def num_sequences(self) -> int:
        """Sequences of at least two tokens in rows that sequences can share, else 0."""
        positions = self.inputs.get("position_ids")
        if positions is None or self.labels is None:
            return 0
        # All padding is at position 0.
        return int(((positions[:, :-1] == 0) & (positions[:, 1:] == 1)).sum())

    def to(self, device: torch.device) -> "MicroBatch":
        """Copy to the device, asynchronously from pinned memory."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def without_targets(self) -> "MicroBatch":
        """Return a placeholder with the same inputs that adds no gradient, samples or tokens."""
        if self.labels is None:
            return replace(self, num_samples=0, num_targets=0)
        blank = math.nan if self.labels.is_floating_point() else IGNORED
        labels = torch.full_like(self.labels, blank)
        places = None if self.places is None else self.places[:0]
        none = (0,) * len(self.samples_of)
        return MicroBatch(self.inputs, labels, 0, 0, 0, places, self.sources, none, none)

    def pin_memory(self) -> "MicroBatch":
        """Return a copy in page-locked memory, for the DataLoader."""
        return self.map(Tensor.pin_memory)

    def map(self, change: Callable[[Tensor], Tensor]) -> "MicroBatch":
        """Return a copy with a function applied to each tensor."""
        names = ("inputs", "labels", "places", "sources")
        values = {name: getattr(self, name) for name in names}
        return replace(self, **tree_map_only(Tensor, change, values))


@dataclass(frozen=True)
class Collator:
    """Collator of a micro-batch, which pads samples to the longest or concatenates them."""

    needs_mask: bool
    """True if the model needs an attention mask for padding."""
    pad: int = PAD
    multiple: int = 1
    """Multiple of tokens to which rows are padded."""
    left: bool = False
    """True if to pad on the left, for models that use the last position."""
    padding_free: bool = False
    """True if to concatenate all samples into one row with restarting positions."""
    sparse: bool = False
    """True if to add the indices of labels with loss."""
    shift: Callable[[Tensor], Tensor] | None = None
    """Function from labels to the decoder's inputs, in seq2seq. It does not change the labels."""
    types: bool = False
    """True if to add token_type_ids, zeros for samples without them."""
    num_sources: int = 0
    """Number of sources of a mix. Each sample names its source."""
    shorten: bool = False
    """True if to shorten the last of several samples, so that memory probes have padding."""
    count: Callable[[dict[str, Any], int], int] | None = None
    """Function from a batch and its samples to the divisor of a mean loss of own code."""

    def __call__(self, samples: list[Sample]) -> MicroBatch:
        """Build a micro-batch from at least one sample."""
        if self.shorten and len(samples) > 1:
            # Drop the first token of each sequence, since a model may pool at the last.
            shorter = {
                name: row[1:] if row.ndim and row.dtype.kind != "f" and len(row) > 1 else row
                for name, row in samples[-1].items()
            }
            samples = [*samples[:-1], shorter]
        rows = [concatenate_samples(samples)] if self.padding_free else samples
        ids = [row["input_ids"] for row in rows]
        inputs = {"input_ids": self._pad(ids, self.pad)}
        num_tokens = sum(map(len, ids))
        if "position_ids" in rows[0]:
            # Each padding token at position 0 is a sequence of its own, without attention to
            # others.
            inputs["position_ids"] = self._pad([row["position_ids"] for row in rows], 0)
        if self.needs_mask:
            inputs["attention_mask"] = self._pad([np.ones_like(row) for row in ids], 0)
        if self.types:
            kinds = [row.get("token_type_ids", np.zeros_like(row["input_ids"])) for row in rows]
            inputs["token_type_ids"] = self._pad(kinds, 0)
        each = [row["labels"] for row in rows]
        whole = each[0].ndim == 0 or each[0].dtype.kind == "f"
        labels = np.stack(each) if whole else self._pad(each, IGNORED)
        counts = is_label(labels)
        sources, first = None, [0] * len(samples)  # samples of probes have no source
        if self.num_sources:
            of = np.zeros(labels.shape, int)
            if "source" in rows[0]:
                named = [row["source"] for row in rows]
                first = [sample["source"].flat[0] for sample in samples]
                of = np.stack(named) if whole else self._pad(named, 0)
            sources = of[..., None] == np.arange(self.num_sources)
        tensors = {name: torch.from_numpy(array) for name, array in inputs.items()}
        if self.shift:
            tensors["decoder_input_ids"] = self.shift(torch.from_numpy(labels))
            num_tokens += sum(map(len, each))
        num_targets, targets = int(np.count_nonzero(counts)), torch.from_numpy(labels)
        if self.count:
            num_targets = self.count({**tensors, "labels": targets}, len(samples))
        return MicroBatch(
            inputs=tensors,
            labels=targets,
            num_samples=len(samples),
            num_targets=num_targets,
            num_tokens=num_tokens,
            places=torch.from_numpy(np.flatnonzero(counts)) if self.sparse else None,
            sources=None if sources is None else torch.from_numpy(sources),
            samples_of=tuple(map(first.count, range(self.num_sources))),
            targets_of=() if sources is None else tuple(sources[counts].sum(0).tolist()),
            num_skipped=sum(int(sample.get("skipped", 0)) for sample in samples),
        )

    def _pad(self, rows: list[np.ndarray], value: int) -> np.ndarray:
        """Return rows of shape `[length]` as one array `[rows, longest]`."""
        longest = max(map(len, rows))
        padded = np.full((len(rows), longest + -longest % self.multiple), value)
        for into, row in zip(padded, rows, strict=True):
            into[-len(row) if self.left else 0 :][: len(row)] = row
        return padded


_SAMPLES_AT_ONCE = 2**16
"""Samples of a stream whose order is computed at a time."""


@dataclass(frozen=True)
class SampleOrder:
    """Samples of each step, a function of seed and step, with a new permutation per epoch."""

    num_samples: int
    samples_per_step: int
    seed: int
    lengths: np.ndarray | None = None
    """Tokens of each sample, if samples of similar length are to share a step."""
    mix: MixtureSampler | None = None
    """Draws from the sources of a mix, `num_samples` per epoch."""
    is_stream: bool = False
    """True if samples are numbered across epochs. In a mix, at least one source is a stream."""

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one pass over the samples."""
        return -(-self.num_samples // self.samples_per_step)

    def size_of(self, step: int) -> int:
        """Return the number of samples of a step, smaller for the last step of an epoch."""
        done = step % self.steps_per_epoch * self.samples_per_step
        return min(self.samples_per_step, self.num_samples - done)

    def permutation(self, epoch: int) -> Tensor:
        """Return the sample numbers of an epoch, int64 `[num_samples]`."""
        generator = torch.Generator().manual_seed(mix_seed(self.seed, epoch))
        order = torch.randperm(self.num_samples, generator=generator)
        return order if self.lengths is None else self._grouped(order, generator)

    def _grouped(self, order: Tensor, generator: torch.Generator) -> Tensor:
        """Sort the order by length within large chunks, and shuffle all full steps."""
        lengths = torch.from_numpy(np.asarray(self.lengths))[order]
        size = self.samples_per_step
        parts = []
        for start in range(0, len(order), GROUPED_STEPS * size):
            stretch = slice(start, start + GROUPED_STEPS * size)
            by_length = torch.argsort(lengths[stretch], descending=True, stable=True)
            parts.append(order[stretch][by_length])
        grouped = torch.cat(parts)
        num_whole = len(grouped) // size
        whole = grouped[: num_whole * size].view(num_whole, size)
        shuffled = whole[torch.randperm(num_whole, generator=generator)]
        return torch.cat([shuffled.reshape(-1), grouped[num_whole * size :]])

    def steps(self, start: int, stop: int) -> Iterator[list[Key]]:
        """Yield the keys of the samples of each step from `start` to `stop` - 1."""
        size, held, at_once = self.samples_per_step, (-1, -1), self.steps_per_epoch
        if self.is_stream:  # an epoch can be very long. An epoch of a source is drawn at a time.
            rows = max(_SAMPLES_AT_ONCE, *self.mix.sizes) if self.mix else _SAMPLES_AT_ONCE
            at_once = -(-rows // size)
        epochs, numbers = np.zeros(0, int), np.zeros(0, int)
        for step in range(start, stop):
            epoch, done = divmod(step, self.steps_per_epoch)
            part, at = divmod(done, at_once)
            if (epoch, part) != held:
                held = epoch, part
                epochs, numbers = self.keys(epoch, part * at_once * size, at_once * size)
            here = slice(at * size, (at + 1) * size)
            yield list(zip(epochs[here].tolist(), numbers[here].tolist(), strict=True))

    def keys(
        self, epoch: int, first: int = 0, most: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return epochs and numbers, int64, of an epoch, or of `most` samples from `first` on."""
        count = min(self.num_samples - first, most or self.num_samples)
        begin = epoch * self.num_samples + first
        if self.mix is None:
            order = np.arange(begin, begin + count)
            order = order if self.is_stream else self.permutation(epoch).numpy()
            return np.full(count, epoch), order
        epochs, numbers = self.mix.take(begin, count)
        if self.lengths is None:
            return epochs, numbers
        order = replace(self, lengths=self.lengths[numbers]).permutation(epoch).numpy()
        return epochs[order], numbers[order]


def cut_step(
    keys: list[Key], per_device: int, rank: int = 0, world_size: int = 1
) -> list[list[Key]]:
    """Return the micro-batches of a rank: every `world_size`-th group of `per_device` samples."""
    groups = [keys[at : at + per_device] for at in range(0, len(keys), per_device)]
    return groups[rank::world_size]


_T = TypeVar("_T")

AT_MOST = 8
"""Largest number of items in a burst."""
LONG_ENOUGH_S = 1e-3
"""Time limit of a burst in seconds: too short to affect step times, enough to warm up caches."""


def prefetch_in_groups(
    items: Iterator[_T], clock: Callable[[], float] = time.perf_counter
) -> Iterator[_T]:
    """Yield items, prepared several at a time."""
    # A model's step evicts the batching code from the processor's caches: 0.36 ms per step one by
    # one, 0.05 ms in groups of eight, for four short samples (notes/lab/loop.md, 2026-11-23).
    while True:
        made, start = [], clock()
        for item in items:
            made.append(item)
            if len(made) == AT_MOST or clock() - start >= LONG_ENOUGH_S:
                break
        if not made:
            return
        yield from made


class Transfer:
    """Copy of micro-batches to a device, on a GPU in a stream that does not wait for computing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch 2.13

    def __call__(self, batch: MicroBatch) -> MicroBatch:
        """Return the micro-batch on the device, for work queued later in the current stream."""
        if self.stream is None:
            return batch
        with torch.cuda.stream(self.stream):
            moved = batch.to(self.device)
        computing = torch.cuda.current_stream(self.device)
        computing.wait_stream(self.stream)
        for tensor in moved.tensors:
            # The copying stream must not reuse this memory before the computing stream has read it.
            tensor.record_stream(computing)
        return moved


@dataclass
class CacheRelease:
    """Hook that empties the allocator's cache every n steps, between forward and backward."""

    every: int | None
    device: torch.device
    calls: int = 0
    """Number of times the allocator was emptied."""

    def after_forward(self, step: int) -> None:
        """Empty the cache after a forward pass of this step (counted from 0), if it is due."""
        if self.every is None or (step + 1) % self.every or self.device.type != "cuda":
            return  # PyTorch does not cache blocks on a CPU
        torch.cuda.empty_cache()
        self.calls += 1


@dataclass(frozen=True)
class LongestSamples:
    """Samples of maximum length for memory probes, made of one ordinary token."""

    plan: Plan
    evaluation: bool

    def __len__(self) -> int:
        steps = self.plan.steps
        return steps.num_eval_samples if self.evaluation else steps.num_train_samples

    def __getitem__(self, key: Key) -> Sample:
        config, micro, batch = self.plan.config, self._micro, self.plan.batch
        size = batch.eval_per_device if self.evaluation else batch.per_device
        length, num_samples = micro.source, size * batch.devices
        if config.data.packing is Packing.padding_free:  # all samples share its only row
            return probe_sample(self.plan, -(-length // num_samples), micro.target, num_samples)
        if config.data.packing is Packing.on and is_ragged(config):
            # Two samples per row: libraries skip the separation of a single sample.
            cut = length // 2
            parts = [probe_sample(self.plan, n, n, num_samples) for n in (cut, length - cut)]
            return concatenate_samples(parts)
        return probe_sample(self.plan, length, micro.target, num_samples)

    def lengths(self) -> np.ndarray:
        """Return the tokens of each sample, `[samples]`."""
        return np.full(len(self), self._micro.source)

    @property
    def _micro(self) -> MicroBatchShape:
        plan = self.plan
        return evaluated(plan) if self.evaluation else simulated_micro_batches(plan).longest


def probe_sample(plan: Plan, length: int, of_target: int, num_samples: int) -> Sample:
    """Return a sample of one ordinary token, with the most labels of `num_samples` samples."""
    config, vocabulary = plan.config, plan.vocabulary
    special = {vocabulary.pad, vocabulary.eos, vocabulary.mask, *vocabulary.special}
    ordinary = next(token for token in range(len(special) + 1) if token not in special)
    ids = np.full(length, ordinary)
    if plan.targets.has_target:
        return {"input_ids": ids, "labels": np.full(of_target, ordinary)}
    if not plan.targets.per_token:
        # T5 pools at the end of text, which each row contains once (eke.training.batches.tasks).
        ids[-1] = vocabulary.pad if vocabulary.eos is None else vocabulary.eos
        return {"input_ids": ids, "labels": as_label(plan.targets, 0)}
    most = -(-most_predicted(config, num_samples, length) // num_samples)
    return {"input_ids": ids, "labels": np.where(np.arange(length) < most, ids, IGNORED)}


def is_label(labels: np.ndarray) -> np.ndarray:
    """Return which labels have a loss."""
    return np.asarray(~np.isnan(labels) if labels.dtype.kind == "f" else labels != IGNORED)
