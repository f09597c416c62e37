"""Store of prepared tokens: a folder of memory-mapped arrays, renamed into place when complete.

`tokens.bin` has all tokens, `offsets.bin` the start of each row, and `manifest.json` the counts and
the tokenizer's vocabulary. `eke.data.preparation` writes them.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import cattrs

from eke.common.text import BOS, BYTE_VOCABULARY, EOS, MASK, NUM_SPECIAL_TOKENS, PAD
from eke.config.schema import Data
from eke.data.sources.cache import cache_folder

if TYPE_CHECKING:
    import numpy as np

BYTES = "bytes"
"""`data.tokenizer` value of eke's byte tokenizer."""

AUTO = "auto"
"""The checkpoint's tokenizer, filled in when the model is resolved; bytes for other models."""


def tokenizer_of(data: Data) -> str:
    """Resolved `data.tokenizer`; empty for data without one."""
    typed = getattr(data, "tokenizer", "")
    return BYTES if typed == AUTO else typed


@dataclass(frozen=True)
class Frame:
    """Special tokens around a text."""

    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Number of special tokens."""
        return len(self.prefix) + len(self.suffix)


@dataclass(frozen=True)
class Vocabulary:
    """Size and special ids of one tokenizer; the defaults are the byte tokenizer's."""

    tokenizer: str = BYTES
    """`bytes`, a folder, or a Hub name."""
    size: int = BYTE_VOCABULARY
    """All ids are smaller."""
    pad: int = PAD
    """Padding id; EOS if the tokenizer has no padding token."""
    pad_is_eos: bool = False
    """Whether padding is EOS: the tokenizer has no padding token, or the same for both."""
    bos: int | None = BOS
    eos: int | None = EOS
    mask: int | None = MASK
    """Replaces a token in masked_lm."""
    special: tuple[int, ...] = ()
    """Ids never masked; none for byte tokens (BOS is a separator there)."""
    first_random: int = NUM_SPECIAL_TOKENS
    """Smallest id of a random replacement in masking."""
    frame: Frame = Frame()
    """Special tokens around a text; none for windows of byte tokens."""
    target_frame: Frame = Frame()
    """Special tokens around a seq2seq target."""
    has_types: bool = field(default=False, repr=False)  # the text is hashed, and older than this
    """Whether the tokenizer makes token_type_ids, in pairs of texts."""

    @property
    def is_bytes(self) -> bool:
        """Whether every token is one byte, so that loss per token is loss per byte."""
        return self.tokenizer == BYTES

    def random_below(self, model_vocab_size: int) -> int:
        """Upper bound of random replacements in masking."""
        return model_vocab_size if self.is_bytes else self.size


BYTE_TOKENS = Vocabulary()
"""eke's byte tokens; synthetic data avoids their special ids, too."""

MANIFEST = "manifest.json"
"""Written last; a folder without it is incomplete."""

DTYPES = {
    "offsets": "<i8",  # first token of each row, and the end
    "cuts": "<i4",  # tokens of a row without loss: the prompt or the source; the first of two texts
    "trained": "|u1",  # whether each token is trained, in conversations
    "labels": "<i4",  # class of each row, or the classes of all rows
    "label_offsets": "<i8",  # first class of each row with several, and the end
    "values": "<f4",  # label of each row in regression
    "train": "<i8",  # rows to train on
    "evaluation": "<i8",
    "train_members": "<i8",  # rows of each pack: positions in `train`
    "train_offsets": "<i8",
    "evaluation_members": "<i8",
    "evaluation_offsets": "<i8",
}
"""Arrays other than the tokens, and their numpy dtypes."""


@dataclass(frozen=True)
class TokenStream:
    """Concatenated documents of one class and split."""

    evaluation: bool
    label: int
    start: int
    """First token."""
    size: int
    """Tokens."""


@dataclass(frozen=True)
class Manifest:
    """Contents of a store and statistics of its preparation."""

    key: str
    digest: str
    """Hash of the model's inputs: tokens, cuts, trained tokens, labels, splits, special ids."""
    vocabulary: Vocabulary
    token_bytes: int
    """Bytes per token in `tokens.bin`: 2 or 4."""
    counts: dict[str, int]
    """Elements of each array."""
    num_rows: int = 0
    """Rows read, bad and empty ones included."""
    num_bad: int = 0
    num_truncated: int = 0
    num_other_prompts: int = 0
    """Rows that do not begin with the tokens of the prompt tokenized alone, as in generation."""
    num_trained: int = 0
    """Tokens that are trained, of conversations."""
    chat_template: str = ""
    """The template that rendered conversations, in jinja."""
    ends_of_turn: tuple[int, ...] = ()
    """Special tokens that end the last trained answer of a conversation."""
    plain_markers: tuple[str, ...] = ()
    """Markers of the chat template that are ordinary tokens."""
    ignored: tuple[str, ...] = ()
    """Keys of rows that change nothing of a conversation: `id (12 rows)`."""
    num_doubled: int = 0
    """Rows with a repeated special token at the beginning or the end."""
    first_row: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    """First and last tokens of the first row, decoded."""
    num_empty: int = 0
    num_held: int = 0
    """Rows of a stream's files, bad and empty ones included, before those to train on."""
    bad_rows: tuple[str, ...] = ()
    """The first ones with location and reason: `data.jsonl:17 is not JSON`."""
    bad_fix: str = ""
    """Override that makes most bad rows usable; empty if there is none."""
    label_names: tuple[str, ...] = ()
    """Text labels by class; empty if labels are numbers."""
    label_kind: str = ""
    """How labels are read: `number`, `name`, ... (`eke.data.preparation.labels`)."""
    given_names: tuple[str, ...] = ()
    """Names of the rows' class numbers, by number."""
    num_replaced: int = 0
    """Invalid UTF-8 characters, replaced by U+FFFD."""
    streams: tuple[TokenStream, ...] = ()
    """Streams of documents; empty for rows."""


def store_folder(key: str) -> Path:
    """Folder of the store with this key."""
    return cache_folder() / "data" / key


def read_manifest(folder: Path) -> Manifest | None:
    """Read the manifest; None if it is missing or a file has the wrong size."""
    try:
        manifest = cattrs.structure(json.loads((folder / MANIFEST).read_bytes()), Manifest)
        size = manifest.token_bytes
        whole = all(
            (folder / f"{name}.bin").stat().st_size == count * int(array_dtype(name, size)[-1])
            for name, count in manifest.counts.items()
        )
    except (OSError, ValueError, KeyError, cattrs.BaseValidationError):
        return None
    return manifest if whole else None


def array_dtype(name: str, token_bytes: int) -> str:
    """Numpy dtype of an array of a store."""
    return f"<u{token_bytes}" if name == "tokens" else DTYPES[name]


@dataclass(frozen=True)
class Store:
    """An open store."""

    folder: Path
    manifest: Manifest

    def array(self, name: str) -> "np.ndarray":
        """One array, memory-mapped and read-only."""
        import numpy as np  # slow import, needed by few plans

        dtype = array_dtype(name, self.manifest.token_bytes)
        if not (count := self.manifest.counts[name]):
            return np.zeros(0, dtype)  # an empty file cannot be mapped
        return np.memmap(self.folder / f"{name}.bin", dtype, mode="r", shape=(count,))

    def has(self, name: str) -> bool:
        """Whether the store has this array."""
        return name in self.manifest.counts
