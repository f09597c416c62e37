"""From a token sequence to a training sample of one task. Labels are aligned with the logits."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from eke.build.samples import Source, mix_seed
from eke.schema import Config, MaskedLM, Seq2SeqLM
from eke.tokens import EOS, IGNORED, MASK, NUM_SPECIAL_TOKENS, PAD

Sample = dict[str, Tensor]
"""`input_ids` (length,), `labels` (length,) or (), and `decoder_input_ids` (target,) in seq2seq."""

Key = tuple[int, int]
"""Epoch and index of a sample."""


@dataclass(frozen=True)
class TaskSamples:
    """Samples of one task over one source; what a DataLoader indexes."""

    source: Source
    config: Config

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, key: Key) -> Sample:
        """The sample with this number in this epoch (masking differs between epochs)."""
        return TASKS[self.config.task.option](self, *key)


def causal_lm(samples: TaskSamples, epoch: int, index: int) -> Sample:
    """Each position predicts the next token; the last one predicts nothing."""
    tokens = samples.source.tokens(index)
    labels = torch.full_like(tokens, IGNORED)
    labels[:-1] = tokens[1:]
    return {"input_ids": tokens, "labels": labels}


def masked_lm(samples: TaskSamples, epoch: int, index: int) -> Sample:
    """BERT's objective: of the chosen tokens 80 % are masked, 10 % replaced, 10 % kept.

    Source: Devlin et al. 2018, arXiv:1810.04805, appendix A.1.
    """
    config = samples.config
    assert isinstance(config.task, MaskedLM)
    tokens = samples.source.tokens(index)
    seed = mix_seed(config.seed, epoch, index)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(tokens.shape, generator=generator) < config.task.mask_frac
    chosen[torch.randint(len(tokens), (1,), generator=generator)] = True  # at least one target
    what = torch.rand(tokens.shape, generator=generator)
    random = torch.randint(
        NUM_SPECIAL_TOKENS, config.model.vocab_size, tokens.shape, generator=generator
    )
    inputs = torch.where(chosen & (what < 0.8), MASK, tokens)
    inputs = torch.where(chosen & (what >= 0.8) & (what < 0.9), random, inputs)
    return {"input_ids": inputs, "labels": torch.where(chosen, tokens, IGNORED)}


def sequence_classification(samples: TaskSamples, epoch: int, index: int) -> Sample:
    """One label per sequence; the sequence ends in EOS, which T5 pools at."""
    tokens = samples.source.tokens(index).clone()
    tokens[-1] = EOS
    return {"input_ids": tokens, "labels": torch.tensor(samples.source.label(index))}


def seq2seq_lm(samples: TaskSamples, epoch: int, index: int) -> Sample:
    """The source is continued: its second part is the target, which ends in EOS."""
    config = samples.config
    assert isinstance(config.task, Seq2SeqLM)
    tokens = samples.source.tokens(index)
    target_len = config.task.target_len or config.data.seq_len
    whole = config.data.seq_len + target_len
    cut = max(1, len(tokens) * config.data.seq_len // whole)  # ragged samples keep the proportion
    target = tokens[cut:].clone()
    target[-1] = EOS
    shifted = torch.cat([torch.tensor([PAD]), target[:-1]])
    return {"input_ids": tokens[:cut], "labels": target, "decoder_input_ids": shifted}


TASKS: dict[str, Callable[[TaskSamples, int, int], Sample]] = {
    "causal_lm": causal_lm,
    "masked_lm": masked_lm,
    "sequence_classification": sequence_classification,
    "seq2seq_lm": seq2seq_lm,
}
"""Option of the group `task` -> how a sample is made."""
