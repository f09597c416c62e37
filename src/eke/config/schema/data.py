"""Schemas of the work: task, data, batches and length of training."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from eke.config.schema.fields import AutoBool, Key, OptionGroup, above, at_least, between

MAX_STEPS = 10**9
"""Maximum optimizer steps of a run. At 1 ms per step they take more than eleven days."""

DEFAULT_PER_DEVICE = 8
"""Samples per micro-batch of batch=fixed."""

_COMPRESSED = ("", ".gz", ".bz2", ".xz", ".zst")
"""Endings of compressed files that the datasets library opens."""

ENDINGS: dict[str, tuple[str, ...]] = {
    "jsonl": tuple(kind + c for kind in (".jsonl", ".ndjson", ".json") for c in _COMPRESSED),
    "csv": tuple(".csv" + c for c in _COMPRESSED),
    "parquet": (".parquet", ".pq"),
}
ENDINGS["chat"] = ENDINGS["jsonl"] + ENDINGS["parquet"] + ENDINGS["csv"]
"""Option of the group `data` -> endings of its files in a folder."""


class Lengths(Enum):
    """Distribution of sequence lengths in synthetic data."""

    fixed = "fixed"
    uniform = "uniform"
    lognormal = "lognormal"


class Packing(Enum):
    """Layout of samples of unequal length in a forward pass."""

    off = "off"
    """One sample per row, padded to the longest sample."""
    on = "on"
    """Several samples per row of `seq_len` tokens. Samples do not attend to each other."""
    padding_free = "padding_free"
    """All samples of a micro-batch in one row. Samples do not attend to each other."""


class ProblemType(Enum):
    """Kind of label, as in transformers' `problem_type`."""

    single = "single"
    multi_label = "multi_label"
    regression = "regression"

    @property
    def full_name(self) -> str:
        """Value of transformers' `problem_type`."""
        kind = self.value.removesuffix("_label")
        return kind if self is ProblemType.regression else f"{kind}_label_classification"


@dataclass
class Task(OptionGroup):
    """Prediction task of the model."""

    option: str = "causal_lm"
    router_loss: str = field(default="auto", metadata=Key.LEARNING)
    """Router loss that balances the experts of a mixture. auto: used if the checkpoint's
    config.json has output_router_logits=true. off: not used. Else the coefficient of the auxiliary
    loss."""
    # Facts about a task, not keys: its number of classes and share of masked tokens, whether
    # labels are tokens, each token predicts the next one, and the target is a separate sequence.
    problem = ProblemType.single
    num_labels, mask_frac = 0, 0.0
    per_token, is_causal, has_target = True, True, False

    @property
    def is_generated(self) -> bool:
        """Whether a trained model can generate targets, token by token."""
        return self.is_causal or self.has_target


@dataclass
class MaskedLM(Task):
    """Predict masked tokens (Devlin et al. 2018, arXiv:1810.04805)."""

    mask_frac: float = field(default=0.15, metadata=Key.GROUP | between(0.01, 0.99))
    """Share of tokens to predict. 80 % of them are masked, 10 % random, 10 % unchanged."""
    is_causal = False


@dataclass
class SequenceClassification(Task):
    """Predict one label per sequence."""

    num_labels: int = field(default=2, metadata=Key.GROUP | at_least(1))
    """Number of classes. `problem=regression` sets it to 1."""
    problem: ProblemType = field(default=ProblemType.single, metadata=Key.GROUP)
    """Kind of label. single: one class per sequence (cross-entropy). multi_label: any number of
    classes (binary cross-entropy). regression: a number (squared error)."""
    labels: list[str] = field(default_factory=list, metadata=Key.GROUP)
    """Names of the classes 0, 1, ... for numeric labels. For labels with names, the order of the
    classes. []: names from the data or the checkpoint."""
    per_token, is_causal = False, False


@dataclass
class Seq2SeqLM(Task):
    """Predict a target sequence from a source sequence."""

    target_len: int | None = field(default=None, metadata=Key.GROUP | at_least(2))
    """Tokens of the target. null: `data.seq_len`."""
    is_causal, has_target = False, True


TASKS: dict[str, type] = {
    "causal_lm": Task,
    "masked_lm": MaskedLM,
    "sequence_classification": SequenceClassification,
    "seq2seq_lm": Seq2SeqLM,
}
"""Schema name -> class."""


@dataclass
class Data(OptionGroup):
    """Keys of all data sources."""

    option: str = "python_source"
    seq_len: int = field(default=256, metadata=Key.GROUP | at_least(4))
    """Tokens per training sample (seq2seq_lm: of the source)."""
    num_samples: int | None = field(default=None, metadata=Key.GROUP | between(1, 10**9))
    """Number of training samples. null: all."""
    num_eval_samples: int = field(default=64, metadata=Key.GROUP | between(1, 10**7))
    """Number of evaluation samples. They are not used for training."""
    packing: Packing = field(default=Packing.off, metadata=Key.BOTH)
    """Layout of samples in a batch. off: pad each sample. on: several whole samples per row of
    `seq_len` tokens. padding_free: all samples of a micro-batch in one row. on and padding_free
    require causal_lm and a decoder."""
    length_grouping: bool = field(default=False, metadata=Key.BOTH)
    """Use samples of similar length in each optimizer step. This reduces padding."""
    pad_to_multiple_of: int | None = field(default=None, metadata=Key.ROUNDING | between(2, 4096))
    """Pad micro-batches to a multiple of tokens. 8 is fast on tensor cores. null: any length."""

    @property
    def is_stream(self) -> bool:
        """True if training reads its rows as a stream."""
        return isinstance(self, Rows) and self.streaming


@dataclass
class _Tokenized(Data):
    """Data that consists of text."""

    tokenizer: str = field(default="auto", metadata=Key.GROUP)
    """Tokenizer: auto, bytes, or a folder or name on the hub. auto: the checkpoint's tokenizer with
    model=pretrained, else bytes. transformers' AutoTokenizer loads a folder or name."""


@dataclass
class PythonSource(_Tokenized):
    """Source code of Python's standard library, packed: real text on every machine."""


@dataclass
class Synthetic(Data):
    """Random token ids and labels of any shape, as in the guides."""

    lengths: Lengths = field(default=Lengths.fixed, metadata=Key.GROUP)
    """Distribution of the lengths. fixed: `seq_len` tokens. uniform: between `min_len` and
    `seq_len`. lognormal: around `median_len`, clipped to the same interval."""
    min_len: int | None = field(default=None, metadata=Key.GROUP | at_least(2))
    """Shortest sample in tokens. null: half of `seq_len` (uniform) or 2 (lognormal)."""
    median_len: int | None = field(default=None, metadata=Key.GROUP | at_least(2))
    """Median of lognormal lengths. null: a quarter of `seq_len`."""
    sigma: float = field(default=0.6, metadata=Key.GROUP | between(0.01, 5))
    """Standard deviation of the logarithm of lognormal lengths."""
    min_token: int = field(default=100, metadata=Key.GROUP | at_least(0))
    """Smallest token id. The guides' 100 excludes special tokens."""
    max_token: int = field(default=30000, metadata=Key.GROUP | at_least(1))
    """Exclusive limit of token ids (the guides' 30000). The vocabulary is also a limit."""
    data_seed: int = field(default=0, metadata=Key.LEARNING | at_least(0))
    """Seed of the data. `seed` does not change the samples."""


@dataclass
class Text(_Tokenized):
    """Text of a file or of all files of a folder, packed."""

    path: str = field(default="???", metadata=Key.GROUP)
    """File or folder (options that read rows: also a glob)."""
    pattern: str = field(default="*.txt", metadata=Key.GROUP)
    """Glob of files in a folder, searched recursively."""
    eval_frac: float = field(default=0.1, metadata=Key.GROUP | between(0.001, 1))
    """Share of the data for evaluation. text: whole files of a folder, or the end of a file (1: the
    training data). Rows: selected by a hash of their content."""


@dataclass
class Rows(_Tokenized):
    """Rows with named columns. Each row is one sample."""

    eval_frac: float = field(default=0.1, metadata=Key.GROUP | between(0.001, 0.9))
    """Share of the rows for evaluation. Selected by a hash of their content."""
    streaming: bool = field(default=False, metadata=Key.GROUP)
    """Stream rows during training, without a full hub download. Only the evaluation samples are
    prepared: the first `num_eval_samples` rows, or rows of `eval_path` or `eval_split`."""
    shuffle_buffer: int = field(default=1000, metadata=Key.LEARNING | between(0, 10**7))
    """Rows in the buffer from which a stream draws the next row. 0 or 1: the order of the files."""


@dataclass
class TextColumns:
    """Columns of texts and labels."""

    text: str = field(default="text", metadata=Key.GROUP)
    """Column of the text. Not used by seq2seq_lm, or by causal_lm with `prompt`."""
    text_pair: str | None = field(default=None, metadata=Key.GROUP)
    """Column of a second text after the first one. Used by sequence_classification. null: none."""
    prompt: str | None = field(default=None, metadata=Key.GROUP)
    """Column of the prompt, which is not predicted. seq2seq_lm: column of the source. null:
    none."""
    response: str | None = field(default=None, metadata=Key.GROUP)
    """Column of the answer, predicted after the prompt. seq2seq_lm: column of the target. null:
    none."""
    separator: str | None = field(default=None, metadata=Key.GROUP)
    """Text between prompt and response (causal_lm). null: a newline. It is omitted next to white
    space and after a prompt rendered by a template."""
    label: str = field(default="label", metadata=Key.GROUP)
    """Column of the label. Classes are whole numbers from 0, or texts (numbered in sorted order).
    multi_label: a list of classes, or a list with 0 or 1 per class. In csv the list is JSON, or
    separated by commas or semicolons (empty: no class). regression: a number."""
    multi_hot: bool | None = field(default=None, metadata=Key.GROUP)
    """True if label lists have 0 or 1 per class. false: class numbers or names. null: detected."""
    max_bad_frac: float = field(default=0.01, metadata=Key.GROUP | between(0, 1))
    """Maximum share of unusable rows, which are skipped. Examples: invalid JSON, wrong type."""


@dataclass
class LocalRows(Rows):
    """Rows of local files."""

    path: str = field(default="???", metadata=Key.GROUP)
    """File, folder or glob."""
    pattern: str | None = field(default=None, metadata=Key.GROUP)
    """Glob of the files in a folder, searched recursively. null: all file names of the format."""
    eval_path: str | None = field(default=None, metadata=Key.GROUP)
    """File, folder or glob for evaluation. null: `eval_frac` of the rows."""
    max_row_bytes: int = field(default=16 << 20, metadata=Key.NONE | between(1, 2**30))
    """Maximum bytes of a row after decompression. A file with a longer row is rejected."""


@dataclass
class Files(TextColumns, LocalRows):
    """Local files of texts."""


@dataclass
class HubRows(Rows):
    """Rows of a data set on the Hugging Face hub, or of a local folder in the hub's layout."""

    name: str = field(default="???", metadata=Key.GROUP)
    """Name on the hub (`owner/name`) or local folder."""
    config_name: str | None = field(default=None, metadata=Key.GROUP)
    """Configuration of the data set. null: its only configuration."""
    split: str = field(default="train", metadata=Key.GROUP)
    """Split for training."""
    eval_split: str | None = field(default=None, metadata=Key.GROUP)
    """Split for evaluation. null: `eval_frac` of the rows."""
    revision: str | None = field(default=None, metadata=Key.GROUP)
    """Branch, tag or commit. null: the newest commit at the first download."""


@dataclass
class Hub(TextColumns, HubRows):
    """Texts of a data set on the hub."""


class _TrainOn(Enum):
    """Trained messages of a conversation."""

    assistant = "assistant"
    last_assistant = "last_assistant"
    all = "all"


class BadRows(Enum):
    """Treatment of unusable rows."""

    error = "error"
    skip = "skip"


@dataclass
class Conversations(Rows):
    """Column, template and trained messages of conversations."""

    messages: str | None = field(default=None, metadata=Key.GROUP)
    """Column of the conversation or of the answer. Conversation: messages with role and content, or
    ShareGPT's from and value. Answer: `completion` (after `prompt`), `output` (after `instruction`
    and `input`) or `response` (after `query`). null: the only column of this kind."""
    chat_template: str | None = field(default=None, metadata=Key.GROUP)
    """Jinja file, or name of a template of the tokenizer. null: the tokenizer's default."""
    train_on: _TrainOn = field(default=_TrainOn.assistant, metadata=Key.GROUP)
    """Trained messages. assistant: every answer with its end of turn. last_assistant: the last
    answer. all: every token."""
    bad_rows: BadRows = field(default=BadRows.error, metadata=Key.GROUP)
    """Unusable rows. error: stop at the first unusable row. skip: count it and continue."""

    @property
    def max_bad_frac(self) -> float:
        """Maximum share of unusable rows."""
        return 1.0 if self.bad_rows is BadRows.skip else 0.0


@dataclass
class Chat(Conversations, LocalRows):
    """Conversations in local files."""


@dataclass
class ChatHub(Conversations, HubRows):
    """Conversations of a data set on the hub."""


@dataclass
class Mix(_Tokenized):
    """Samples of several sources, drawn by weight."""

    sources: list[dict[str, Any]] = field(default_factory=list, metadata=Key.GROUP)
    """Sources of the mix, as a list of mappings. Each has `option` (jsonl, csv, parquet, hub, chat,
    chat_hub, text), keys of that option, `weight` and `name`. `data.sources.0.weight=0.5` changes
    one key."""

    @property
    def is_stream(self) -> bool:
        """True if training reads any source as a stream."""
        return any(source.get("streaming") is True for source in self.sources)


@dataclass
class Weighted:
    """Additional keys of a source of a mix."""

    weight: float | None = field(default=None, metadata=above(0))
    """Weight relative to the other sources. null for all sources: their number of samples."""
    name: str | None = None
    """Name in losses. null: the file name (hub: data set, configuration and split)."""


MIXED: dict[str, type[Data]] = {
    "jsonl": Files, "csv": Files, "parquet": Files, "hub": Hub, "chat": Chat, "chat_hub": ChatHub,
    "text": Text,
}  # fmt: skip
"""`option` of a source of a mix -> class. Workers use it because they do not read option files."""


@dataclass
class Batch(OptionGroup):
    """Number of samples per optimizer step, and their division into forward passes."""

    option: str = "fixed"
    per_device: int | None = field(default=DEFAULT_PER_DEVICE, metadata=Key.ROUNDING | at_least(1))
    """Samples per device and forward pass (micro-batch). null: the most that fit (batch=auto)."""
    accumulation: int | None = field(default=None, metadata=Key.ROUNDING | at_least(1))
    """Forward passes per optimizer step. null: from `target`, else 1."""
    target: int | None = field(default=None, metadata=Key.BOTH | at_least(1))
    """Samples per optimizer step on all devices. null: per_device x accumulation x processes
    (batch=auto: 8 x processes). Fine-tuning may use more (docs/how-to/models.md)."""
    eval_per_device: int | None = field(default=None, metadata=Key.ROUNDING | at_least(1))
    """Samples per device in evaluation. null: per_device."""

    @property
    def micro_batch(self) -> int:
        """`per_device`, or 1 if it is not chosen yet."""
        return self.per_device or 1


@dataclass
class Train:
    """Length of training, evaluation, checkpoints and timing."""

    steps: int | None = field(default=None, metadata=Key.BUDGET | between(1, MAX_STEPS))
    """Number of optimizer steps. null: from `epochs`, else 300."""
    epochs: float | None = field(default=None, metadata=Key.BUDGET | above(0))
    """Number of passes over the training samples. null: not used."""
    max_grad_norm: float | None = field(
        default=1.0, metadata=Key.LEARNING | above(0, null_is_off=True)
    )
    """Maximum norm of all gradients. null: no clipping."""
    record_grad_norm: bool = field(default=True, metadata=Key.ROUNDING)
    """Record the gradient norm of each step. false: read gradients once less if possible."""
    log_every: int = field(default=10, metadata=Key.NONE | at_least(1))
    """Steps between writes to metrics.jsonl. The device is not synchronized in between."""
    eval_every: int | None = field(default=None, metadata=Key.NONE | at_least(1))
    """Steps between evaluations. null: before the first and after the last step."""
    early_stop_patience: int | None = field(
        default=None, metadata=Key.BUDGET | at_least(1, null_is_off=True)
    )
    """Evaluations without improvement that end the run. An improvement is a lower loss, or a better
    `keep_best`. null: no early stop."""
    keep_best: str | None = field(default=None, metadata=Key.LEARNING)
    """Metric that selects the final model (loss, accuracy, ...). null: the last checkpoint."""
    checkpoint_every: int | None = field(
        default=200, metadata=Key.NONE | at_least(1, null_is_off=True)
    )
    """Steps between checkpoints. null: only at the end and on a stop signal."""
    checkpoint_async: bool | None = field(default=None, metadata=Key.NONE)
    """Write the state to disk during the next steps. The state is first copied to the host.
    Requires several processes with parts of the state. null: if possible."""
    keep_checkpoints: int = field(default=2, metadata=Key.NONE | at_least(1))
    """Number of newest complete checkpoints to keep."""
    save_final: bool = field(default=True, metadata=Key.NONE)
    """Keep a checkpoint of the finished run."""
    save_on_signal: bool = field(default=True, metadata=Key.NONE)
    """Save a checkpoint when stopped by a signal. false: resume from the last checkpoint."""
    timing_warmup_steps: int = field(default=5, metadata=Key.NONE | at_least(2))
    """First steps of each attempt, excluded from all timings. Kernels are recorded in the first of
    these steps, memory in the second."""
    resume: str | None = field(default=None, metadata=Key.NONE)
    """Folder or id of an unfinished run to resume. `distributed.*` and `batch.*` may differ if the
    samples per step are the same. null: the run of this configuration."""
    stop_on_nonfinite: bool = field(default=True, metadata=Key.NONE)
    """End the run as diverged if a loss is not finite. Checks logged losses and the last
    evaluation."""


@dataclass
class DataLoader(OptionGroup):
    """Loading of batches."""

    workers: int = field(default=0, metadata=Key.ROUNDING | between(0, 256))
    """Number of loader processes. 0: the training process collates batches."""
    pin_memory: AutoBool = field(default=AutoBool.auto, metadata=Key.ROUNDING)
    """Use page-locked host memory. auto: on for CUDA."""
    prefetch: int | None = field(default=None, metadata=Key.ROUNDING | at_least(1))
    """Batches that each loader process prepares ahead. null: 2 (PyTorch)."""
    persistent: bool = field(default=False, metadata=Key.ROUNDING)
    """Keep loader processes of evaluation between evaluations. Training always keeps its own."""
