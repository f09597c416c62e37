"""Store of prepared tokens: a folder of memory-mapped arrays, renamed into place when complete.

`tokens.bin` has all tokens, `offsets.bin` the start of each row, and `manifest.json` the counts.
`eke.data.preparation` writes them.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eke.data.sources.cache import cache_folder
from eke.data.sources.vocabulary import Frame, Vocabulary

if TYPE_CHECKING:
    import numpy as np

MANIFEST = "manifest.json"
"""Written last; a folder without it is incomplete."""

DTYPES = {
    "offsets": "<i8",  # first token of each row, and the end
    "cuts": "<i4",  # tokens of a row without loss: the prompt or the source
    "labels": "<i4",  # class of each row
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
    """Hash of the model's inputs: tokens, cuts, labels, splits, special ids."""
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
    num_doubled: int = 0
    """Rows with a repeated special token at the beginning or the end."""
    first_row: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    """First and last tokens of the first row, decoded."""
    num_empty: int = 0
    bad_rows: tuple[str, ...] = ()
    """The first ones with location and reason: `data.jsonl:17 is not JSON`."""
    bad_fix: str = ""
    """Override that makes most bad rows usable; empty if there is none."""
    label_names: tuple[str, ...] = ()
    """Text labels by class; empty if labels are numbers."""
    num_replaced: int = 0
    """Invalid UTF-8 characters, replaced by U+FFFD."""
    streams: tuple[TokenStream, ...] = ()
    """Streams of documents; empty for rows."""


def store_folder(key: str) -> Path:
    """Folder of the store with this key."""
    return cache_folder() / "data" / key


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, the last file of a store."""
    text = json.dumps(dataclasses.asdict(manifest), indent=1)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Manifest | None:
    """Read the manifest; None if it is missing or a file has the wrong size."""
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
        manifest = _manifest(content)
        whole = all(
            (folder / f"{name}.bin").stat().st_size == count * int(_dtype(manifest, name)[-1])
            for name, count in manifest.counts.items()
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return manifest if whole else None


def _manifest(content: dict[str, Any]) -> Manifest:
    vocabulary = content.pop("vocabulary")
    vocabulary["special"] = tuple(vocabulary["special"])
    for name in ("frame", "target_frame"):
        vocabulary[name] = Frame(*(tuple(vocabulary[name][side]) for side in ("prefix", "suffix")))
    streams = tuple(TokenStream(**stream) for stream in content.pop("streams"))
    first, last = content.pop("first_row")
    content["first_row"] = (tuple(first), tuple(last))
    lists = {k: tuple(v) for k, v in content.items() if isinstance(v, list)}
    return Manifest(**{**content, **lists}, vocabulary=Vocabulary(**vocabulary), streams=streams)


def _dtype(manifest: Manifest, name: str) -> str:
    return token_dtype(manifest.token_bytes) if name == "tokens" else DTYPES[name]


def token_dtype(token_bytes: int) -> str:
    """Numpy dtype of `tokens.bin`."""
    return "<u2" if token_bytes == 2 else "<u4"


@dataclass(frozen=True)
class Store:
    """An open store."""

    folder: Path
    manifest: Manifest

    def array(self, name: str) -> "np.ndarray":
        """One array, memory-mapped and read-only.

        Raises:
            OSError: the file does not exist.
        """
        import numpy as np  # slow import, needed by few plans

        dtype = _dtype(self.manifest, name)
        count = self.manifest.counts[name]
        if not count:
            return np.zeros(0, dtype)  # an empty file cannot be mapped
        return np.memmap(self.folder / f"{name}.bin", dtype, mode="r", shape=(count,))

    def has(self, name: str) -> bool:
        """Whether the store has this array."""
        return name in self.manifest.counts
