"""Which rows are trained on, and which are evaluated on."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from eke.data.preparation.columns import Fields
from eke.data.preparation.writer import Writer

MOST_EQUAL = 100_000
"""Equal rows remembered, 4 MB of numbers: a table of nothing else crosses by one row anyway."""

Outermost = tuple[int, list[int]]
"""The smallest or largest hash so far, and the numbers of the rows that have it."""


@dataclass
class Splits:
    """Rows are split by a hash of their texts, so that equal ones are on the same side."""

    writer: Writer
    eval_frac: float
    _lowest: Outermost | None = None
    """First to be evaluated on."""
    _highest: Outermost | None = None

    def add(self, rows: list[Fields], first: int, evaluation: bool | None) -> None:
        """Share out rows.

        Args:
            rows: follow each other in the store.
            first: number of the first one.
            evaluation: which side they are on where their source says so; None: their hash does.
        """
        if evaluation is not None:
            numbers = list(range(first, first + len(rows)))
            self.writer.append("evaluation" if evaluation else "train", numbers)
            return
        bound = int(self.eval_frac * 2**64)
        kept: tuple[list[int], list[int]] = ([], [])
        for number, row in enumerate(rows, first):
            digest = hashlib.blake2b(repr(row.texts).encode(), digest_size=8).digest()
            value = int.from_bytes(digest, "little")
            kept[value < bound].append(number)
            self._lowest = _outermost(self._lowest, value, number, -1)
            self._highest = _outermost(self._highest, value, number, 1)
        self.writer.append("train", kept[0])
        self.writer.append("evaluation", kept[1])

    def fill_empty_side(self) -> None:
        """Few rows may all have fallen to one side: one crosses, with those that equal it.

        Where all are equal, or nearly, it crosses alone.
        """
        counts = self.writer.counts
        full, empty = ("train", "evaluation") if counts["train"] else ("evaluation", "train")
        crossing = self._lowest if full == "train" else self._highest
        assert crossing is not None, "no row was split by its hash"
        _, equal = crossing
        moved = equal if len(equal) < min(counts[full], MOST_EQUAL) else equal[:1]
        old = self.writer.read(full)
        self.writer.append(empty, moved)
        self.writer.replace(full, (part[~np.isin(part, moved)] for part in parts_of(old)))


def parts_of(array: np.ndarray) -> Iterator[np.ndarray]:
    """An array that may be larger than memory, in pieces of a million."""
    for start in range(0, len(array), 1 << 20):
        yield np.asarray(array[start : start + (1 << 20)])


def _outermost(so_far: Outermost | None, value: int, number: int, sign: int) -> Outermost:
    """With one more row; `sign` is 1 for the largest hash, -1 for the smallest."""
    if so_far is None or value * sign > so_far[0] * sign:
        return value, [number]
    if value == so_far[0] and len(so_far[1]) < MOST_EQUAL:
        so_far[1].append(number)
    return so_far
