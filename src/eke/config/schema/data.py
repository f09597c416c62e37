"""Schemas of what is trained: task, data, batches and length of training."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from eke.config.schema.fields import Key, OptionGroup, Switch, above, at_least, between

MAX_STEPS = 10**9
"""Optimizer steps of a run: at 1 ms each, more than eleven days."""

DEFAULT_PER_DEVICE = 8
"""Samples of a micro-batch of batch=fixed."""

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
    """How samples of unequal length share a forward pass."""

    off = "off"
    """Each sample is one row, padded to the longest."""
    on = "on"
    """Rows of `seq_len` tokens hold several whole samples; none sees another."""
    padding_free = "padding_free"
    """The samples of a micro-batch lie end to end in one row; none sees another."""


class ProblemType(Enum):
    """What a label is, as in transformers' `problem_type`."""

    single = "single"
    multi_label = "multi_label"
    regression = "regression"

    @property
    def full_name(self) -> str:
        """As transformers writes it."""
        kind = self.value.removesuffix("_label")
        return kind if self is ProblemType.regression else f"{kind}_label_classification"


@dataclass
class Task(OptionGroup):
    """What the model learns to predict."""

    option: str = "causal_lm"
    router_loss: str = field(default="auto", metadata=Key.LEARNING)
    """Loss that balances the experts of a mixture. auto: if the checkpoint's config.json has
    output_router_logits=true. off, or the coefficient of its auxiliary loss."""
    problem = ProblemType.single  # no key but of classification


@dataclass
class MaskedLM(Task):
    """Predict masked tokens (Devlin et al. 2018, arXiv:1810.04805)."""

    mask_frac: float = field(default=0.15, metadata=Key.GROUP | between(0.01, 0.99))
    """Share of tokens to predict; 80 % masked, 10 % random, 10 % kept."""


@dataclass
class SequenceClassification(Task):
    """Predict one label per sequence."""

    num_labels: int = field(default=2, metadata=Key.GROUP | at_least(1))
    """Number of classes; 1 for regression, set by `problem`."""
    problem: ProblemType = field(default=ProblemType.single, metadata=Key.GROUP)
    """single: one class per sequence (cross-entropy); multi_label: any number of classes (binary
    cross-entropy of each); regression: a number (squared error)."""
    labels: list[str] = field(default_factory=list, metadata=Key.GROUP)
    """Names of the classes 0, 1, ... of rows whose labels are numbers, and the order of classes
    that rows name. []: the names of the data or of the checkpoint."""


@dataclass
class Seq2SeqLM(Task):
    """Predict a target sequence from a source sequence."""

    target_len: int | None = field(default=None, metadata=Key.GROUP | at_least(2))
    """Tokens of the target; null is as many as `data.seq_len`."""


@dataclass
class Data(OptionGroup):
    """What every data source has."""

    option: str = "python_source"
    seq_len: int = field(default=256, metadata=Key.GROUP | at_least(4))
    """Tokens per training sample (of the source, in seq2seq)."""
    num_samples: int | None = field(default=None, metadata=Key.GROUP | between(1, 10**9))
    """Training samples; null takes all there are."""
    num_eval_samples: int = field(default=64, metadata=Key.GROUP | between(1, 10**7))
    """Evaluation samples, never seen in training."""
    packing: Packing = field(default=Packing.off, metadata=Key.BOTH)
    """off pads; on packs whole samples into rows of `seq_len`; padding_free lays a micro-batch end
    to end (both for causal_lm on decoders)."""
    length_grouping: bool = field(default=False, metadata=Key.BOTH)
    """Samples of similar length share an optimizer step, so that less is padded."""
    pad_to_multiple_of: int | None = field(default=None, metadata=Key.ROUNDING | between(2, 4096))
    """Pad each micro-batch to a multiple of this many tokens (8 suits tensor cores); null: not."""

    @property
    def is_stream(self) -> bool:
        """Whether rows to train on are read while training."""
        return isinstance(self, Rows) and self.streaming


@dataclass
class Tokenized(Data):
    """Data that is text."""

    tokenizer: str = field(default="auto", metadata=Key.GROUP)
    """auto is the checkpoint's own with model=pretrained, else bytes; or bytes, or what
    transformers' AutoTokenizer loads: a folder, or a name on the hub."""


@dataclass
class PythonSource(Tokenized):
    """The Python standard library's own source: real text on every machine, packed."""


@dataclass
class Synthetic(Data):
    """Random token ids and labels, as in the guides: any shape, nothing to learn."""

    lengths: Lengths = field(default=Lengths.fixed, metadata=Key.GROUP)
    """fixed: every sample has `seq_len` tokens; uniform: between `min_len` and `seq_len`;
    lognormal: around `median_len`, clipped to that interval."""
    min_len: int | None = field(default=None, metadata=Key.GROUP | at_least(2))
    """Shortest sample; null is half of `seq_len` when lengths are uniform, 2 when lognormal."""
    median_len: int | None = field(default=None, metadata=Key.GROUP | at_least(2))
    """Median of lognormal lengths; null is a quarter of `seq_len`."""
    sigma: float = field(default=0.6, metadata=Key.GROUP | between(0.01, 5))
    """Standard deviation of the logarithm of lognormal lengths."""
    min_token: int = field(default=100, metadata=Key.GROUP | at_least(0))
    """Smallest token id (the guides' 100 leaves out special tokens)."""
    max_token: int = field(default=30000, metadata=Key.GROUP | at_least(1))
    """Token ids end below this (the guides' 30000) or the vocabulary, whichever is smaller."""
    data_seed: int = field(default=0, metadata=Key.LEARNING | at_least(0))
    """Seed of the data alone, so that `seed` changes the training and not the samples."""


@dataclass
class Text(Tokenized):
    """A text file, or all files of a folder, packed."""

    path: str = field(default="???", metadata=Key.GROUP)
    """File or folder."""
    pattern: str = field(default="*.txt", metadata=Key.GROUP)
    """Which files of a folder (searched recursively)."""
    eval_frac: float = field(default=0.1, metadata=Key.GROUP | between(0.001, 1))
    """Share kept for evaluation: whole files of a folder, the end of a single file; 1 evaluates on
    all that is trained on."""


@dataclass
class Rows(Tokenized):
    """Rows with named columns; each is one sample."""

    eval_frac: float = field(default=0.1, metadata=Key.GROUP | between(0.001, 0.9))
    """Share of the rows kept for evaluation, chosen by a hash of their content."""
    streaming: bool = field(default=False, metadata=Key.GROUP)
    """Read the rows while training, of the hub without downloading all, and prepare only the
    evaluation: the first `num_eval_samples` ones, or those of `eval_path` or `eval_split`."""
    shuffle_buffer: int = field(default=1000, metadata=Key.LEARNING | between(0, 10**7))
    """Rows of a stream among which the next one is drawn; 0 or 1 keeps the order of the files."""


@dataclass
class TextColumns:
    """Columns with texts and labels."""

    text: str = field(default="text", metadata=Key.GROUP)
    """Column with the text (causal_lm without `prompt`, masked_lm, sequence_classification)."""
    text_pair: str | None = field(default=None, metadata=Key.GROUP)
    """Column with a second text, read after the first one (sequence_classification)."""
    prompt: str | None = field(default=None, metadata=Key.GROUP)
    """Column that is read and not predicted: the prompt in causal_lm, the source in seq2seq_lm."""
    response: str | None = field(default=None, metadata=Key.GROUP)
    """Column that is predicted after the prompt: the answer in causal_lm, the target in
    seq2seq_lm."""
    separator: str | None = field(default=None, metadata=Key.GROUP)
    """Between prompt and response (causal_lm). null is a newline, and nothing where either has
    white space there already, or where the prompt was rendered by a template."""
    label: str = field(default="label", metadata=Key.GROUP)
    """Column with the class: a whole number from 0 on, or a text (numbered in sorted order); for
    multi_label a list of them, in csv as JSON or separated by commas or semicolons (empty: no
    class), or a list of zeros and ones; for regression a number."""
    multi_hot: bool | None = field(default=None, metadata=Key.GROUP)
    """Whether lists of labels have a 0 or a 1 for each class (multi_label). false: class numbers or
    names. null: as the whole column shows."""
    max_bad_frac: float = field(default=0.01, metadata=Key.GROUP | between(0, 1))
    """Share of rows that may be unusable (not JSON, a wrong type, ...); they are skipped."""


@dataclass
class LocalRows(Rows):
    """Rows of local files."""

    path: str = field(default="???", metadata=Key.GROUP)
    """File, folder or glob."""
    pattern: str | None = field(default=None, metadata=Key.GROUP)
    """Which files of a folder (searched recursively); null is all of the format's names."""
    eval_path: str | None = field(default=None, metadata=Key.GROUP)
    """File, folder or glob for evaluation; null keeps `eval_frac` of the rows."""
    max_row_bytes: int = field(default=16 << 20, metadata=Key.NONE | between(1, 2**30))
    """Longest row, after decompression; a file with a longer one is refused."""


@dataclass
class Files(TextColumns, LocalRows):
    """Local files of texts."""


@dataclass
class HubRows(Rows):
    """Rows of a data set of the Hugging Face hub, or of a local folder in the hub's layout."""

    name: str = field(default="???", metadata=Key.GROUP)
    """Name on the hub (`owner/name`), or a folder."""
    config_name: str | None = field(default=None, metadata=Key.GROUP)
    """Configuration of the data set; null where it has only one."""
    split: str = field(default="train", metadata=Key.GROUP)
    """Split to train on."""
    eval_split: str | None = field(default=None, metadata=Key.GROUP)
    """Split to evaluate on; null keeps `eval_frac` of the rows."""
    revision: str | None = field(default=None, metadata=Key.GROUP)
    """Branch, tag or commit; null is the newest at the time of the first download."""


@dataclass
class Hub(TextColumns, HubRows):
    """Texts of the hub."""


class TrainOn(Enum):
    """Messages of a conversation that are trained."""

    assistant = "assistant"
    last_assistant = "last_assistant"
    all = "all"


class BadRows(Enum):
    """What happens to rows that cannot be trained on."""

    error = "error"
    skip = "skip"


@dataclass
class Conversations(Rows):
    """Which column is a conversation, how it is rendered, and what of it is trained."""

    messages: str | None = field(default=None, metadata=Key.GROUP)
    """Column of the conversation: messages with role and content, or ShareGPT's from and value; or
    of the answer: `completion` (after `prompt`), `output` (after `instruction` and `input`),
    `response` (after `query`). null finds it where there is one candidate."""
    chat_template: str | None = field(default=None, metadata=Key.GROUP)
    """File with a template in jinja, or the name of one of the tokenizer's; null is its default."""
    train_on: TrainOn = field(default=TrainOn.assistant, metadata=Key.GROUP)
    """assistant trains every answer with its end of turn, last_assistant the last one, all every
    token."""
    bad_rows: BadRows = field(default=BadRows.error, metadata=Key.GROUP)
    """error refuses the data if a row cannot be trained on; skip counts such rows and goes on."""

    @property
    def max_bad_frac(self) -> float:
        """Share of rows that may be unusable."""
        return 1.0 if self.bad_rows is BadRows.skip else 0.0


@dataclass
class Chat(Conversations, LocalRows):
    """Local files of conversations."""


@dataclass
class ChatHub(Conversations, HubRows):
    """Conversations of the hub."""


@dataclass
class Mix(Tokenized):
    """Samples of several sources, drawn by weight."""

    sources: list[dict[str, Any]] = field(default_factory=list, metadata=Key.GROUP)
    """Each with `option` (jsonl, csv, parquet, hub, chat, chat_hub, text), keys of that option, a
    `weight` and a `name`; changed one by one by their number, `data.sources.0.weight=0.5`."""

    @property
    def is_stream(self) -> bool:
        """Whether those of a source are."""
        return any(source.get("streaming") is True for source in self.sources)


@dataclass
class Weighted:
    """Keys of a source of a mix besides those of its option."""

    weight: float | None = field(default=None, metadata=above(0))
    """Relative to the others'; null for all of them is their number of samples."""
    name: str | None = None
    """Of its losses; null is the file's. On the hub it is the data set's, and losses have the
    configuration and the split in their name, too."""


MIXED: dict[str, type[Data]] = {
    "jsonl": Files, "csv": Files, "parquet": Files, "hub": Hub, "chat": Chat, "chat_hub": ChatHub,
    "text": Text,
}  # fmt: skip
"""`option` of a source of a mix -> class, for workers, which read no option files."""


@dataclass
class Batch(OptionGroup):
    """How many samples make one optimizer step."""

    option: str = "fixed"
    per_device: int | None = field(default=DEFAULT_PER_DEVICE, metadata=Key.ROUNDING | at_least(1))
    """Samples per device and forward pass (micro-batch); null is the largest that fits, which
    batch=auto chooses."""
    accumulation: int | None = field(default=None, metadata=Key.ROUNDING | at_least(1))
    """Forward passes per optimizer step; null is derived from `target`, else 1."""
    target: int | None = field(default=None, metadata=Key.BOTH | at_least(1))
    """Samples per optimizer step on all devices; null: per_device x accumulation x processes, for
    batch=auto 8 x processes; fine-tuning may take more (docs/how-to/models.md)."""
    eval_per_device: int | None = field(default=None, metadata=Key.ROUNDING | at_least(1))
    """Samples per device in evaluation; null is per_device."""

    @property
    def micro_batch(self) -> int:
        """`per_device`, and 1 where it is still to be chosen."""
        return self.per_device or 1


@dataclass
class Train:
    """Length of training and what happens along the way."""

    steps: int | None = field(default=None, metadata=Key.BUDGET | between(1, MAX_STEPS))
    """Optimizer steps; null derives them from `epochs`, else 300."""
    epochs: float | None = field(default=None, metadata=Key.BUDGET | above(0))
    """Passes over the training samples."""
    max_grad_norm: float | None = field(
        default=1.0, metadata=Key.LEARNING | above(0, null_is_off=True)
    )
    """Clip the global gradient norm; null does not clip."""
    record_grad_norm: bool = field(default=True, metadata=Key.ROUNDING)
    """Write the norm of all gradients of each step; false, where nothing needs it, reads them once
    less."""
    log_every: int = field(default=10, metadata=Key.NONE | at_least(1))
    """Steps between writes of metrics.jsonl; the device is never waited for in between."""
    eval_every: int | None = field(default=None, metadata=Key.NONE | at_least(1))
    """Steps between evaluations; null evaluates before the first and after the last step."""
    early_stop_patience: int | None = field(
        default=None, metadata=Key.BUDGET | at_least(1, null_is_off=True)
    )
    """Evaluations in a row without a lower loss, or a better `keep_best`, after which the run ends
    well; null never."""
    keep_best: str | None = field(default=None, metadata=Key.LEARNING)
    """Metric of the evaluations (loss, accuracy, f1_macro, ...) whose best checkpoint is kept and
    is the run's model; null: the last one."""
    checkpoint_every: int | None = field(
        default=200, metadata=Key.NONE | at_least(1, null_is_off=True)
    )
    """Steps between checkpoints; null saves only on a stop signal, and at the end."""
    checkpoint_async: bool | None = field(default=None, metadata=Key.NONE)
    """Copy the state to the host and write it during the next steps; null: if several processes
    hold parts of it, which alone can be written so."""
    keep_checkpoints: int = field(default=2, metadata=Key.NONE | at_least(1))
    """Newest complete checkpoints that are kept."""
    save_final: bool = field(default=True, metadata=Key.NONE)
    """Keep a checkpoint of the finished run."""
    save_on_signal: bool = field(default=True, metadata=Key.NONE)
    """Save before stopping when asked to; false goes on later from the checkpoint that is there."""
    timing_warmup_steps: int = field(default=5, metadata=Key.NONE | at_least(2))
    """First steps of each attempt, shown on their own and excluded from every timing; kernels are
    recorded in the first of them, memory in the second."""
    resume: str | None = field(default=None, metadata=Key.NONE)
    """Folder or id of an unfinished run that goes on, with other `distributed.*` and `batch.*` that
    make the same samples per step; null: the run of this configuration."""
    stop_on_nonfinite: bool = field(default=True, metadata=Key.NONE)
    """End the run as diverged when a logged loss, or the last evaluation's, is not finite."""


@dataclass
class DataLoader(OptionGroup):
    """How batches reach the device."""

    workers: int = field(default=0, metadata=Key.ROUNDING | between(0, 256))
    """Loader processes; 0 collates in the training process."""
    pin_memory: Switch = field(default=Switch.auto, metadata=Key.ROUNDING)
    """Page-locked host memory; auto turns it on for CUDA."""
    prefetch: int | None = field(default=None, metadata=Key.ROUNDING | at_least(1))
    """Batches each loader process prepares ahead; null is PyTorch's 2."""
    persistent: bool = field(default=False, metadata=Key.ROUNDING)
    """Keep evaluation's loader processes between evaluations (training's live all the run)."""
