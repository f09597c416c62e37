"""Store of prepared tokens: a folder of memory-mapped arrays, written by `eke.data.preparation`.

`tokens.bin` contains all tokens, `offsets.bin` the start of each row, and `manifest.json` the
counts and the tokenizer's vocabulary.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import cattrs

from eke.common.text import BOS, BYTE_VOCABULARY, EOS, MASK, NUM_SPECIAL_TOKENS, PAD
from eke.config.schema import Data
from eke.data.sources.content_hash import cache_folder

if TYPE_CHECKING:
    import numpy as np

BYTES = "bytes"
"""`data.tokenizer` value of eke's byte tokenizer."""

AUTO = "auto"
"""`data.tokenizer` value for the checkpoint's tokenizer, or bytes for other models."""


def tokenizer_of(data: Data) -> str:
    """Return the resolved `data.tokenizer`, "" for data without a tokenizer."""
    typed = getattr(data, "tokenizer", "")
    return BYTES if typed == AUTO else typed


@dataclass(frozen=True)
class SpecialTokens:
    """Special tokens around a text."""

    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Number of special tokens."""
        return len(self.prefix) + len(self.suffix)


@dataclass(frozen=True)
class Vocabulary:
    """Size and special ids of a tokenizer. The defaults describe the byte tokenizer."""

    tokenizer: str = BYTES
    """`bytes`, a folder, or a Hub name."""
    size: int = BYTE_VOCABULARY
    """Smallest number above all ids."""
    pad: int = PAD
    """Padding id, or EOS if the tokenizer has no padding token."""
    pad_is_eos: bool = False
    """True if padding is EOS: the tokenizer has no padding token, or the same for both."""
    bos: int | None = BOS
    eos: int | None = EOS
    mask: int | None = MASK
    """Id that replaces masked tokens in masked_lm."""
    special: tuple[int, ...] = ()
    """Ids that are not masked, empty for byte tokens, where BOS is a separator."""
    first_random: int = NUM_SPECIAL_TOKENS
    """Smallest id of a random replacement in masking."""
    frame: SpecialTokens = SpecialTokens()
    """Special tokens around a text, empty for windows of byte tokens."""
    target_frame: SpecialTokens = SpecialTokens()
    has_types: bool = field(default=False, repr=False)  # repr is hashed and must not change
    """True if the tokenizer makes token_type_ids for pairs of texts."""

    @property
    def is_bytes(self) -> bool:
        """True if every token is one byte, so that loss per token is loss per byte."""
        return self.tokenizer == BYTES

    def random_below(self, model_vocab_size: int) -> int:
        """Return the exclusive upper bound of random replacements in masking."""
        return (model_vocab_size or self.size) if self.is_bytes else self.size


BYTE_TOKENS = Vocabulary()
"""Vocabulary of eke's byte tokens. Synthetic data also avoids its special ids."""

MANIFEST = "manifest.json"
"""File written last. A store without it is incomplete."""

_DTYPES = {
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
    """Range of tokens with the concatenated documents of one class and split."""

    evaluation: bool
    label: int
    start: int
    size: int
    """Number of tokens."""


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
    """Rows read, including bad and empty rows."""
    num_bad: int = 0
    num_truncated: int = 0
    num_other_prompts: int = 0
    """Rows that begin with other tokens than the separately tokenized prompt (as in generation)."""
    num_trained: int = 0
    chat_template: str = ""
    """Jinja source of the template that rendered conversations."""
    ends_of_turn: tuple[int, ...] = ()
    """Special tokens that end the last trained answer of a conversation."""
    plain_markers: tuple[str, ...] = ()
    """Markers of the chat template that are ordinary tokens."""
    ignored: tuple[str, ...] = ()
    """Keys of rows without effect on the text of a conversation: `id (12 rows)`."""
    num_doubled: int = 0
    """Rows with a repeated special token at the beginning or the end."""
    first_row: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    """First and last tokens of the first row, decoded."""
    num_empty: int = 0
    num_held: int = 0
    """Rows of a stream before the first training row, including bad and empty rows."""
    bad_rows: tuple[str, ...] = ()
    """First bad rows with location and reason: `data.jsonl:17 is not JSON`."""
    bad_fix: str = ""
    """Override that makes most bad rows usable, empty without one."""
    label_names: tuple[str, ...] = ()
    """Text labels by class, empty if labels are numbers."""
    label_kind: str = ""
    """Reading of labels: `number`, `name`, ... (`eke.data.preparation.labels`)."""
    given_names: tuple[str, ...] = ()
    """Names that the data gives its class numbers, by number."""
    num_replaced: int = 0
    """Invalid UTF-8 characters replaced by U+FFFD."""
    streams: tuple[TokenStream, ...] = ()


def store_folder(key: str) -> Path:
    """Return the folder of the store with this key."""
    return cache_folder() / "data" / key


def read_manifest(folder: Path) -> Manifest | None:
    """Read the manifest of a store; None if it is missing or a file has the wrong size."""
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
    """Return the numpy dtype of an array of a store."""
    return f"<u{token_bytes}" if name == "tokens" else _DTYPES[name]


@dataclass(frozen=True)
class Store:
    """An open store."""

    folder: Path
    manifest: Manifest

    def array(self, name: str) -> "np.ndarray":
        """Map an array read-only."""
        import numpy as np  # slow import, needed by few plans

        dtype = array_dtype(name, self.manifest.token_bytes)
        if not (count := self.manifest.counts[name]):
            return np.zeros(0, dtype)  # an empty file cannot be mapped
        return np.memmap(self.folder / f"{name}.bin", dtype, mode="r", shape=(count,))

    def has(self, name: str) -> bool:
        """Return whether the store has this array."""
        return name in self.manifest.counts
