"""From samples to micro-batches: padding, counting, and which samples each optimizer step sees."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from eke.common.tokens import IGNORED, PAD
from eke.data.sources import mix_seed
from eke.plan.planner.lengths import GROUPED_STEPS, Micro
from eke.training.batches.tasks import Key, Sample, lay_end_to_end


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass takes, and the counts that need no look at the device."""

    inputs: dict[str, Tensor]
    """Arguments of the model's forward pass; `input_ids` has shape (samples, longest)."""
    labels: Tensor
    """Aligned with the logits: (samples, longest), or (samples,) in classification."""
    num_samples: int
    num_targets: int
    """Labels that count: the loss of a step is the mean over all of these."""
    num_tokens: int
    """Input and target tokens that are not padding."""
    places: Tensor | None = None
    """Of the labels that count, in the flattened labels: (num_targets,), int64; None where logits
    are wanted everywhere."""

    @property
    def tensors(self) -> list[Tensor]:
        """All there are."""
        places = [] if self.places is None else [self.places]
        return [*self.inputs.values(), self.labels, *places]

    @property
    def num_positions(self) -> int:
        """Places in the tensors the model reads, padding included."""
        names = ("input_ids", "decoder_input_ids")
        return sum(self.inputs[name].numel() for name in names if name in self.inputs)

    @property
    def size(self) -> Micro:
        """Rows and their length."""
        rows, source = self.inputs["input_ids"].shape
        decoder = self.inputs.get("decoder_input_ids")
        return Micro(rows, source, source if decoder is None else decoder.shape[1])

    @property
    def num_sequences(self) -> int:
        """Sequences of two tokens or more in rows that they may share; 0 where they may not."""
        positions = self.inputs.get("position_ids")
        if positions is None:
            return 0
        # Padding stays at position 0.
        return int(((positions[:, :-1] == 0) & (positions[:, 1:] == 1)).sum())

    def to(self, device: torch.device) -> "MicroBatch":
        """On the device; copies from pinned memory do not wait."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def without_targets(self) -> "MicroBatch":
        """The same inputs, counting for nothing: no gradient comes from it, no sample, no token."""
        labels = torch.full_like(self.labels, IGNORED)
        places = None if self.places is None else self.places[:0]
        return replace(
            self, labels=labels, places=places, num_samples=0, num_targets=0, num_tokens=0
        )

    def pin_memory(self) -> "MicroBatch":
        """In page-locked memory; the DataLoader calls this."""
        return self.map(Tensor.pin_memory)

    def map(self, change: Callable[[Tensor], Tensor]) -> "MicroBatch":
        """With each of its tensors changed."""
        inputs = {name: change(tensor) for name, tensor in self.inputs.items()}
        places = None if self.places is None else change(self.places)
        return replace(self, inputs=inputs, labels=change(self.labels), places=places)


@dataclass(frozen=True)
class Collator:
    """Makes one micro-batch of samples, padded to the longest or laid end to end."""

    needs_mask: bool
    """Give the model an attention mask: padding would otherwise be attended to."""
    pad: int = PAD
    """Token that fills rows up."""
    multiple: int = 1
    """Rows are padded to a multiple of this many tokens."""
    left: bool = False
    """Padding comes first, for models whose last place counts."""
    padding_free: bool = False
    """One row of all samples, whose positions restart at each."""
    sparse: bool = False
    """Say where the labels that count are."""
    shift: Callable[[Tensor], Tensor] | None = None
    """From labels to the decoder's inputs, in seq2seq; it leaves labels as they are."""

    def __call__(self, samples: list[Sample]) -> MicroBatch:
        """One micro-batch from at least one sample."""
        rows = [lay_end_to_end(samples)] if self.padding_free else samples
        ids = [row["input_ids"] for row in rows]
        inputs = {"input_ids": self._pad(ids, self.pad)}
        num_tokens = sum(map(len, ids))
        if "position_ids" in rows[0]:
            # Padding at position 0 is a sequence of its own each: nothing sees it.
            inputs["position_ids"] = self._pad([row["position_ids"] for row in rows], 0)
        if self.needs_mask:
            inputs["attention_mask"] = self._pad([np.ones_like(row) for row in ids], 0)
        each = [row["labels"] for row in rows]
        labels = np.stack(each) if each[0].ndim == 0 else self._pad(each, IGNORED)
        counts = labels != IGNORED
        tensors = {name: torch.from_numpy(array) for name, array in inputs.items()}
        if self.shift:
            tensors["decoder_input_ids"] = self.shift(torch.from_numpy(labels))
            num_tokens += sum(map(len, each))
        return MicroBatch(
            inputs=tensors,
            labels=torch.from_numpy(labels),
            num_samples=len(samples),
            num_targets=int(np.count_nonzero(counts)),
            num_tokens=num_tokens,
            places=torch.from_numpy(np.flatnonzero(counts)) if self.sparse else None,
        )

    def _pad(self, rows: list[np.ndarray], value: int) -> np.ndarray:
        """Rows of shape (length,) as one array (rows, longest)."""
        longest = max(map(len, rows))
        padded = np.full((len(rows), longest + -longest % self.multiple), value)
        for into, row in zip(padded, rows, strict=True):
            into[-len(row) if self.left else 0 :][: len(row)] = row
        return padded


@dataclass(frozen=True)
class Order:
    """Which samples optimizer step k sees: a function of the seed and k alone.

    Micro-batch size, accumulation and ranks only cut a step's samples, so that any split of the
    same global batch trains on the same samples. Each epoch is a new permutation; its last step may
    hold fewer samples.
    """

    num_samples: int
    samples_per_step: int
    seed: int
    lengths: np.ndarray | None = None
    """Tokens of each sample, where those of similar length shall share a step."""

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one pass over the samples."""
        return -(-self.num_samples // self.samples_per_step)

    def size_of(self, step: int) -> int:
        """Samples of one step: fewer in the last one of an epoch."""
        done = step % self.steps_per_epoch * self.samples_per_step
        return min(self.samples_per_step, self.num_samples - done)

    def permutation(self, epoch: int) -> Tensor:
        """Sample numbers of one epoch, int64, shape (num_samples,)."""
        generator = torch.Generator().manual_seed(mix_seed(self.seed, epoch))
        order = torch.randperm(self.num_samples, generator=generator)
        return order if self.lengths is None else self._grouped(order, generator)

    def _grouped(self, order: Tensor, generator: torch.Generator) -> Tensor:
        """Sorted by length within large stretches; then whole steps are shuffled.

        An epoch's last, smaller step stays the last.
        """
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
        """Keys of the samples of steps `start` to `stop` - 1."""
        epoch, permutation = -1, torch.zeros(0, dtype=torch.int64)
        for step in range(start, stop):
            if step // self.steps_per_epoch != epoch:
                epoch = step // self.steps_per_epoch
                permutation = self.permutation(epoch)
            at = step % self.steps_per_epoch * self.samples_per_step
            chosen: list[int] = permutation[at : at + self.samples_per_step].tolist()
            yield [(epoch, index) for index in chosen]


def cut_step(
    keys: list[Key], per_device: int, rank: int = 0, world_size: int = 1
) -> list[list[Key]]:
    """The micro-batches of one rank: every `world_size`-th group of `per_device` samples."""
    groups = [keys[at : at + per_device] for at in range(0, len(keys), per_device)]
    return groups[rank::world_size]


@dataclass(frozen=True)
class StepSampler:
    """A batch sampler over micro-batches of consecutive steps, for a DataLoader."""

    order: Order
    start: int
    stop: int
    per_device: int
    rank: int = 0
    world_size: int = 1

    def rounds(self) -> Iterator[tuple[int, int]]:
        """How many micro-batches this rank has in each step, and the rank with most of them."""
        for step in range(self.start, self.stop):
            groups = -(-self.order.size_of(step) // self.per_device)
            yield len(range(self.rank, groups, self.world_size)), -(-groups // self.world_size)

    def __iter__(self) -> Iterator[list[Key]]:
        for keys in self.order.steps(self.start, self.stop):
            yield from cut_step(keys, self.per_device, self.rank, self.world_size)
