"""Schemas of what is trained: task, data, batch, length of training."""

from dataclasses import dataclass, field
from enum import Enum

from eke.schema.limits import above, at_least, between

MAX_STEPS = 10**9
"""Optimizer steps of a run: at 1 ms each, more than eleven days."""


class Lengths(Enum):
    """Distribution of sequence lengths in synthetic data."""

    fixed = "fixed"
    uniform = "uniform"


@dataclass
class Task:
    """What the model learns to predict."""

    option: str = "causal_lm"
    """The option chosen; set by the option's file."""


@dataclass
class MaskedLM(Task):
    """Predict masked tokens (Devlin et al. 2018, arXiv:1810.04805)."""

    mask_frac: float = field(default=0.15, metadata=between(0.01, 0.99))
    """Share of tokens to predict; 80 % masked, 10 % random, 10 % kept."""


@dataclass
class SequenceClassification(Task):
    """Predict one label per sequence."""

    num_labels: int = field(default=2, metadata=at_least(2))
    """Number of classes."""


@dataclass
class Seq2SeqLM(Task):
    """Predict a target sequence from a source sequence."""

    target_len: int | None = field(default=None, metadata=at_least(2))
    """Tokens of the target; null is as many as `data.seq_len`."""


@dataclass
class Data:
    """What every data source has."""

    option: str = "python_source"
    """The option chosen; set by the option's file."""
    seq_len: int = field(default=256, metadata=at_least(4))
    """Tokens per training sample (of the source, in seq2seq)."""
    num_samples: int | None = field(default=None, metadata=between(1, 10**9))
    """Training samples; null takes all there are."""
    num_eval_samples: int = field(default=64, metadata=between(1, 10**7))
    """Evaluation samples, never seen in training."""


@dataclass
class PythonSource(Data):
    """The Python standard library's own source: real text on every machine, byte tokens, packed."""


@dataclass
class Synthetic(Data):
    """Random token ids and labels, as in the guides: any shape, nothing to learn."""

    lengths: Lengths = Lengths.fixed
    """fixed: every sample has `seq_len` tokens; uniform: between `min_len` and `seq_len`."""
    min_len: int | None = field(default=None, metadata=at_least(2))
    """Shortest sample when lengths are uniform; null is half of `seq_len`."""
    min_token: int = field(default=100, metadata=at_least(0))
    """Smallest token id (the guides' 100 leaves out special tokens)."""
    max_token: int = field(default=30000, metadata=at_least(1))
    """Token ids end below this (the guides' 30000) or the vocabulary, whichever is smaller."""
    data_seed: int = field(default=0, metadata=at_least(0))
    """Seed of the data alone, so that `seed` changes the training and not the samples."""


@dataclass
class Text(Data):
    """A text file, or all files of a folder; byte tokens, packed."""

    path: str = "???"
    """File or folder."""
    pattern: str = "*.txt"
    """Which files of a folder (searched recursively)."""
    eval_frac: float = field(default=0.1, metadata=between(0.001, 0.9))
    """Share kept for evaluation: whole files of a folder, the end of a single file."""


@dataclass
class Batch:
    """How many samples make one optimizer step."""

    option: str = "fixed"
    """The option chosen; set by the option's file."""
    per_device: int = field(default=8, metadata=at_least(1))
    """Samples per device and forward pass (micro-batch)."""
    accumulation: int | None = field(default=None, metadata=at_least(1))
    """Forward passes per optimizer step; null is derived from `target`, else 1."""
    target: int | None = field(default=None, metadata=at_least(1))
    """Samples per optimizer step on all devices; null: per_device x accumulation x processes."""
    eval_per_device: int | None = field(default=None, metadata=at_least(1))
    """Samples per device in evaluation; null is per_device."""


@dataclass
class Train:
    """Length of training and what happens along the way."""

    steps: int | None = field(default=None, metadata=between(1, MAX_STEPS))
    """Optimizer steps; null derives them from `epochs`, else 300."""
    epochs: float | None = field(default=None, metadata=above(0))
    """Passes over the training samples."""
    max_grad_norm: float | None = field(default=1.0, metadata=above(0))
    """Clip the global gradient norm; null does not clip (the norm is still recorded)."""
    log_every: int = field(default=10, metadata=at_least(1))
    """Steps between writes of metrics.jsonl; the device is never waited for in between."""
    eval_every: int | None = field(default=None, metadata=at_least(1))
    """Steps between evaluations; null evaluates before the first and after the last step."""
    checkpoint_every: int | None = field(default=200, metadata=at_least(1))
    """Steps between checkpoints; null saves only when asked to stop, and at the end."""
    keep_checkpoints: int = field(default=2, metadata=at_least(1))
    """Newest complete checkpoints that are kept."""
    save_final: bool = True
    """Keep a checkpoint of the finished run."""
    timing_warmup_steps: int = field(default=5, metadata=at_least(2))
    """First steps of each attempt, shown on their own and left out of every timing; what is looked
    at closely (kernels in the first step, memory in the second) is looked at here."""
    stop_on_nonfinite: bool = True
    """End the run as diverged when a logged loss is not finite."""
