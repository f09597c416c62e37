"""From a token sequence to a training sample of one task. Labels are aligned with the logits."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from eke.common.tokens import IGNORED
from eke.config.schema import Config, MaskedLM, Seq2SeqLM
from eke.data.sources import BYTE_TOKENS, Frame, Packs, Vocabulary
from eke.training.batches.samples import Source, seeded

Sample = dict[str, np.ndarray]
"""`input_ids` (length,), `labels` (length,), (target,) or (), and `position_ids` (length,) where
several sequences lie end to end; int64. Arrays: NumPy is faster than torch for small samples
(docs/lab.md, 2026-11-23)."""

Key = tuple[int, int]
"""Epoch and index of a sample."""


@dataclass(frozen=True)
class TaskSamples:
    """Samples of one task over one source; what a DataLoader indexes."""

    source: Source
    config: Config
    vocabulary: Vocabulary = BYTE_TOKENS

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, key: Key) -> Sample:
        """The sample with this number in this epoch (masking differs between epochs)."""
        return TASKS[self.config.task.option](self, *key)

    def lengths(self) -> np.ndarray:
        """Tokens of each sample, source and target together, shape (samples,)."""
        return self.source.lengths()


@dataclass(frozen=True)
class PackedSamples:
    """Rows of several whole samples, none of which sees another."""

    samples: TaskSamples
    packs: Packs
    chosen: np.ndarray
    """Packed row behind each number."""

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, key: Key) -> Sample:
        """The samples of one row, end to end."""
        epoch, index = key
        members = self.packs.row(int(self.chosen[index]))
        return lay_end_to_end([self.samples[epoch, int(member)] for member in members])

    def lengths(self) -> np.ndarray:
        """Tokens of each row."""
        lengths = self.samples.lengths()[self.packs.members]
        sums = np.concatenate([[0], np.cumsum(lengths)])
        of_rows = sums[self.packs.offsets[1:]] - sums[self.packs.offsets[:-1]]
        return np.asarray(of_rows[self.chosen])


def lay_end_to_end(samples: list[Sample]) -> Sample:
    """Several samples as one sequence; positions restart at each, which keeps them apart."""
    return {
        "input_ids": np.concatenate([s["input_ids"] for s in samples]),
        "labels": np.concatenate([s["labels"] for s in samples]),
        "position_ids": np.concatenate([np.arange(len(s["input_ids"])) for s in samples]),
    }


def causal_lm(samples: TaskSamples, epoch: int, index: int) -> Sample:
    """Each position predicts the next token; the last one and a prompt predict nothing."""
    row = samples.source.row(index)
    labels = np.empty_like(row.tokens)
    labels[:-1] = row.tokens[1:]
    labels[-1] = IGNORED
    labels[: max(0, row.cut - 1)] = IGNORED
    return {"input_ids": row.tokens, "labels": labels}


def masked_lm(samples: TaskSamples, epoch: int, index: int) -> Sample:
    """BERT's objective: of the chosen tokens 80 % are masked, 10 % replaced, 10 % kept.

    Source: Devlin et al. 2018, arXiv:1810.04805, appendix A.1.
    """
    config, vocabulary = samples.config, samples.vocabulary
    assert isinstance(config.task, MaskedLM)
    assert vocabulary.mask is not None, "a tokenizer without one is refused when it is loaded"
    tokens = samples.source.row(index).tokens
    if not samples.source.framed and not vocabulary.is_bytes:
        put_into_frame(tokens, vocabulary, vocabulary.frame)
    generator = seeded(config.seed, epoch, index)
    chosen = torch.rand(len(tokens), generator=generator).numpy() < config.task.mask_frac
    at_least = int(torch.randint(len(tokens), (1,), generator=generator))
    ordinary = ~np.isin(tokens, vocabulary.special)
    chosen &= ordinary
    if not chosen.any():  # a row without a target would be read for nothing
        places = np.flatnonzero(ordinary)
        chosen[places[at_least % len(places)] if len(places) else at_least] = True
    what = torch.rand(len(tokens), generator=generator).numpy()
    below = vocabulary.random_below(config.model.vocab_size)
    random = torch.randint(vocabulary.first_random, below, tokens.shape, generator=generator)
    inputs = tokens.copy()
    inputs[chosen & (what < 0.8)] = vocabulary.mask
    replaced = chosen & (what >= 0.8) & (what < 0.9)
    inputs[replaced] = random.numpy()[replaced]
    return {"input_ids": inputs, "labels": np.where(chosen, tokens, IGNORED)}


def sequence_classification(samples: TaskSamples, epoch: int, index: int) -> Sample:
    """One label per sequence."""
    source = samples.source
    tokens = source.row(index).tokens
    if not source.framed:
        put_into_frame(tokens, samples.vocabulary, samples.vocabulary.frame)
    return {"input_ids": tokens, "labels": np.asarray(source.label(index))}


def put_into_frame(tokens: np.ndarray, vocabulary: Vocabulary, frame: Frame) -> None:
    """Have a stretch of text begin and end as the tokenizer writes a text, in place.

    Stretches of byte tokens and of random ones end in the end of text, which T5 pools at.
    """
    prefix, suffix = frame.prefix, frame.suffix
    if vocabulary.is_bytes:
        assert vocabulary.eos is not None, "byte tokens have one"
        suffix = (vocabulary.eos,)
    tokens[: len(prefix)] = prefix[: len(tokens)]
    tokens[max(0, len(tokens) - len(suffix)) :] = suffix[: len(tokens)]


def seq2seq_lm(samples: TaskSamples, epoch: int, index: int) -> Sample:
    """Source and target of a row; of a stretch of text the second part is the target.

    The decoder's inputs are made of the labels of a micro-batch, by the model's own shift.
    """
    config, vocabulary = samples.config, samples.vocabulary
    assert isinstance(config.task, Seq2SeqLM)
    row = samples.source.row(index)
    tokens, cut = row.tokens, row.cut
    if not samples.source.framed:
        whole = config.data.seq_len + (config.task.target_len or config.data.seq_len)
        cut = max(1, len(tokens) * config.data.seq_len // whole)  # ragged: the same proportion
        if not vocabulary.is_bytes:
            put_into_frame(tokens[:cut], vocabulary, vocabulary.frame)
        put_into_frame(tokens[cut:], vocabulary, vocabulary.target_frame)
    target = tokens[cut:]
    return {"input_ids": tokens[:cut], "labels": target}


TASKS: dict[str, Callable[[TaskSamples, int, int], Sample]] = {
    "causal_lm": causal_lm,
    "masked_lm": masked_lm,
    "sequence_classification": sequence_classification,
    "seq2seq_lm": seq2seq_lm,
}
"""Option of the group `task` -> how a sample is made."""
