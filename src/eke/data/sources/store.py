"""Prepared tokens on disk: a folder that appears under its name only once it is complete.

`tokens.bin` holds all tokens one after the other, `offsets.bin` where each row begins, and
`manifest.json` what was counted; all are read memory-mapped. `eke.data.preparation` writes them.
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
"""Written last of all files; a folder without it is no store."""

DTYPES = {
    "offsets": "<i8",  # first token of each row, and the end
    "cuts": "<i4",  # tokens of a row that are not predicted: the prompt, or the source
    "labels": "<i4",  # class of each row
    "train": "<i8",  # rows to train on
    "evaluation": "<i8",
    "train_members": "<i8",  # rows of each pack: positions in `train`
    "train_offsets": "<i8",
    "evaluation_members": "<i8",
    "evaluation_offsets": "<i8",
}
"""Arrays beside the tokens, and numpy's names of their formats."""


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
    num_other_prompts: int = 0
    """Rows that do not begin with the tokens of their prompt alone: generation begins elsewhere."""
    num_doubled: int = 0
    """Rows with the same special token twice at the beginning or at the end."""
    first_row: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    """The first and the last tokens of the first row, decoded."""
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
            (folder / f"{name}.bin").stat().st_size == count * _item_bytes(manifest, name)
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
    streams = tuple(Stream(**stream) for stream in content.pop("streams"))
    first, last = content.pop("first_row")
    content["first_row"] = (tuple(first), tuple(last))
    lists = {k: tuple(v) for k, v in content.items() if isinstance(v, list)}
    return Manifest(**{**content, **lists}, vocabulary=Vocabulary(**vocabulary), streams=streams)


def _dtype(manifest: Manifest, name: str) -> str:
    return token_dtype(manifest.token_bytes) if name == "tokens" else DTYPES[name]


def _item_bytes(manifest: Manifest, name: str) -> int:
    return int(_dtype(manifest, name)[-1])


def token_dtype(token_bytes: int) -> str:
    """Format of `tokens.bin`, as numpy names it."""
    return "<u2" if token_bytes == 2 else "<u4"


@dataclass(frozen=True)
class Store:
    """An open store."""

    folder: Path
    manifest: Manifest

    def array(self, name: str) -> "np.ndarray":
        """One array, memory-mapped and read-only.

        Raises:
            OSError: the file is gone.
        """
        import numpy as np  # a tenth of a plan's time, and few plans need it

        dtype = _dtype(self.manifest, name)
        count = self.manifest.counts[name]
        if not count:
            return np.zeros(0, dtype)  # an empty file cannot be mapped
        return np.memmap(self.folder / f"{name}.bin", dtype, mode="r", shape=(count,))

    def has(self, name: str) -> bool:
        """Whether the store has this array."""
        return name in self.manifest.counts
