"""Prepared tokens on disk: a folder that appears under its name only once it is complete.

`tokens.bin` holds all tokens one after the other, `offsets.bin` where each row begins, and
`manifest.json` what was counted; all are read memory-mapped. `eke.prepare` writes them.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eke.corpus.cache import cache_folder
from eke.corpus.vocabulary import Vocabulary

MANIFEST = "manifest.json"
"""Written last of all files; a folder without it is no store."""

DTYPES: dict[str, np.dtype[Any]] = {
    "offsets": np.dtype("<i8"),  # first token of each row, and the end
    "cuts": np.dtype("<i4"),  # tokens of a row that are not predicted: the prompt, or the source
    "labels": np.dtype("<i4"),  # class of each row
    "train": np.dtype("<i8"),  # rows to train on
    "evaluation": np.dtype("<i8"),
    "train_members": np.dtype("<i8"),  # rows of each pack: positions in `train`
    "train_offsets": np.dtype("<i8"),
    "evaluation_members": np.dtype("<i8"),
    "evaluation_offsets": np.dtype("<i8"),
}
"""Arrays beside the tokens."""


@dataclass(frozen=True)
class Stream:
    """Documents of one class and split, one after the other."""

    evaluation: bool
    label: int
    start: int
    """First token."""
    size: int
    """Tokens."""


@dataclass(frozen=True)
class Manifest:
    """What is in a store, and what happened on the way into it."""

    key: str
    digest: str
    """Hash of all a model sees: tokens, cuts, labels, splits, special ids."""
    vocabulary: Vocabulary
    token_bytes: int
    """Bytes per token in `tokens.bin`: 2 or 4."""
    counts: dict[str, int]
    """Elements of each array that is there."""
    num_rows: int = 0
    """Rows read, bad and empty ones included."""
    num_bad: int = 0
    num_truncated: int = 0
    num_empty: int = 0
    bad_rows: tuple[str, ...] = ()
    """Place and reason of the first ones: `data.jsonl:17 is not JSON`."""
    bad_fix: str = ""
    """The override that would make most bad rows usable; empty where there is none."""
    label_names: tuple[str, ...] = ()
    """Text labels in the order of their numbers; empty when labels are numbers."""
    num_replaced: int = 0
    """Characters of a text that were no UTF-8 and became U+FFFD."""
    streams: tuple[Stream, ...] = ()
    """Of documents; empty for rows."""

    @property
    def num_tokens(self) -> int:
        """Tokens in all."""
        return self.counts["tokens"]


def store_folder(key: str) -> Path:
    """Where the store with this key lies, or would."""
    return cache_folder() / "data" / key


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """The last file of a store."""
    text = json.dumps(dataclasses.asdict(manifest), indent=1)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a complete store; None where there is none, or files of another size."""
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
        manifest = _manifest(content)
        whole = all(
            (folder / f"{name}.bin").stat().st_size == count * _dtype(manifest, name).itemsize
            for name, count in manifest.counts.items()
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return manifest if whole else None


def _manifest(content: dict[str, Any]) -> Manifest:
    vocabulary = content.pop("vocabulary")
    vocabulary["special"] = tuple(vocabulary["special"])
    streams = tuple(Stream(**stream) for stream in content.pop("streams"))
    lists = {k: tuple(v) for k, v in content.items() if isinstance(v, list)}
    return Manifest(**{**content, **lists}, vocabulary=Vocabulary(**vocabulary), streams=streams)


def _dtype(manifest: Manifest, name: str) -> np.dtype[Any]:
    return token_dtype(manifest.token_bytes) if name == "tokens" else DTYPES[name]


def token_dtype(token_bytes: int) -> np.dtype[Any]:
    """Format of `tokens.bin`."""
    return np.dtype(np.uint16 if token_bytes == 2 else np.uint32).newbyteorder("<")


@dataclass(frozen=True)
class Store:
    """An open store."""

    folder: Path
    manifest: Manifest

    def array(self, name: str) -> np.ndarray:
        """One array, memory-mapped and read-only.

        Raises:
            OSError: the file is gone.
        """
        dtype = _dtype(self.manifest, name)
        count = self.manifest.counts[name]
        if not count:
            return np.zeros(0, dtype)  # an empty file cannot be mapped
        return np.memmap(self.folder / f"{name}.bin", dtype, mode="r", shape=(count,))

    def has(self, name: str) -> bool:
        """Whether the store has this array."""
        return name in self.manifest.counts
