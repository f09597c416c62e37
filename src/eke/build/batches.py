"""From samples to micro-batches: padding, counting, and which samples each optimizer step sees."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from eke.build.samples import mix_seed
from eke.build.tasks import Key, Sample
from eke.tokens import IGNORED, PAD


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

    def to(self, device: torch.device) -> "MicroBatch":
        """On the device; copies from pinned memory do not wait."""
        inputs = {name: t.to(device, non_blocking=True) for name, t in self.inputs.items()}
        labels = self.labels.to(device, non_blocking=True)
        return MicroBatch(inputs, labels, self.num_samples, self.num_targets, self.num_tokens)

    def pin_memory(self) -> "MicroBatch":
        """In page-locked memory; the DataLoader calls this."""
        inputs = {name: t.pin_memory() for name, t in self.inputs.items()}
        labels = self.labels.pin_memory()
        return MicroBatch(inputs, labels, self.num_samples, self.num_targets, self.num_tokens)


@dataclass(frozen=True)
class Collator:
    """Stacks samples, padded to the longest."""

    needs_mask: bool
    """Give the model an attention mask: padding would otherwise be attended to."""

    def __call__(self, samples: list[Sample]) -> MicroBatch:
        """One micro-batch from at least one sample."""
        inputs = {"input_ids": _pad([s["input_ids"] for s in samples], PAD)}
        num_tokens = sum(len(s["input_ids"]) for s in samples)
        if "decoder_input_ids" in samples[0]:
            shifted = [s["decoder_input_ids"] for s in samples]
            inputs["decoder_input_ids"] = _pad(shifted, PAD)
            num_tokens += sum(len(t) for t in shifted)
        if self.needs_mask:
            ones = [torch.ones_like(s["input_ids"]) for s in samples]
            inputs["attention_mask"] = _pad(ones, 0)
        labels = [s["labels"] for s in samples]
        stacked = torch.stack(labels) if labels[0].dim() == 0 else _pad(labels, IGNORED)
        num_targets = int((stacked != IGNORED).sum())
        return MicroBatch(inputs, stacked, len(samples), num_targets, num_tokens)


def _pad(rows: list[Tensor], value: int) -> Tensor:
    """Rows of shape (length,) as one tensor (rows, longest)."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


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

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one pass over the samples."""
        return -(-self.num_samples // self.samples_per_step)

    def permutation(self, epoch: int) -> list[int]:
        """Sample numbers of one epoch."""
        generator = torch.Generator().manual_seed(mix_seed(self.seed, epoch))
        order: list[int] = torch.randperm(self.num_samples, generator=generator).tolist()
        return order

    def steps(self, start: int, stop: int) -> Iterator[list[Key]]:
        """Keys of the samples of steps `start` to `stop` - 1."""
        epoch, permutation = -1, []
        for step in range(start, stop):
            if step // self.steps_per_epoch != epoch:
                epoch = step // self.steps_per_epoch
                permutation = self.permutation(epoch)
            at = step % self.steps_per_epoch * self.samples_per_step
            yield [(epoch, index) for index in permutation[at : at + self.samples_per_step]]


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

    def cuts(self) -> Iterator[list[list[Key]]]:
        """The micro-batches of each step."""
        for keys in self.order.steps(self.start, self.stop):
            yield cut_step(keys, self.per_device, self.rank, self.world_size)

    def __iter__(self) -> Iterator[list[Key]]:
        for cut in self.cuts():
            yield from cut
