"""First-fit packing of samples into rows; lengths of synthetic samples."""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

from eke.config.schema import Lengths, Synthetic

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class PackedRows:
    """Assignment of samples to rows."""

    members: "np.ndarray"
    """Sample numbers, grouped by row, int64."""
    offsets: "np.ndarray"
    """Bounds of the rows in `members`: row r is offsets[r] to offsets[r + 1], int64."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, number: int) -> "np.ndarray":
        """Return the sample numbers of one row in order."""
        return self.members[self.offsets[number] : self.offsets[number + 1]]


def _rows_of(lengths: list[int], capacity: int) -> Iterator[int]:
    """Yield the first row with room for each sample, by a segment tree of free tokens."""
    width = 1 << (len(lengths) - 1).bit_length()
    tree = [capacity] * (2 * width)
    for length in lengths:
        node = 1
        while node < width:
            node *= 2
            if tree[node] < length:
                node += 1
        tree[node] -= length
        yield node - width
        while node > 1:
            node //= 2
            tree[node] = max(tree[2 * node], tree[2 * node + 1])


_WINDOW = 1 << 16
"""Samples packed at a time, to bound memory. A row does not span two windows."""


def first_fit(lengths: "np.ndarray", capacity: int) -> PackedRows:
    """Pack samples of at most `capacity` tokens, each into the first row with room.

    Makes at most 1.7 times the fewest rows (Johnson 1973, Near-Optimal Bin Packing Algorithms).
    """
    import numpy as np  # slow import, needed by few plans

    members, sizes = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for start in range(0, len(lengths), _WINDOW):
        window = np.asarray(lengths[start : start + _WINDOW])
        rows = np.fromiter(_rows_of(window.tolist(), capacity), np.int64, len(window))
        members.append(start + np.argsort(rows, kind="stable"))
        sizes.append(np.bincount(rows))
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(sizes))]).astype(np.int64)
    return PackedRows(np.concatenate(members), offsets)


def mix_seed(*parts: int) -> int:
    """Combine several numbers into a 63-bit seed."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def synthetic_length(data: Synthetic, longest: int, split: int, index: int) -> int:
    """Return the tokens of a training (0) or evaluation (1) sample, at most `longest`."""
    if data.lengths is Lengths.fixed:
        return longest
    # Random stream 2 is for lengths, 0 for tokens, 1 for labels.
    share = (mix_seed(data.data_seed, split, index, 2) + 0.5) / 2**63
    is_uniform = data.lengths is Lengths.uniform
    low = data.min_len or (max(2, data.seq_len // 2) if is_uniform else 2)
    assert low <= longest, "a rule rejects it"
    if is_uniform:
        return min(longest, low + int(share * (longest - low + 1)))
    # 2**63 shares cover +-9 standard deviations. Rounding may turn the last share into 1.0.
    share = min(max(share, 2**-53), 1 - 2**-53)
    median = data.median_len or max(2, data.seq_len // 4)  # before clipping
    drawn = median * math.exp(data.sigma * NormalDist().inv_cdf(share))
    return round(min(max(drawn, low), longest))


def synthetic_lengths(data: Synthetic, longest: int, split: int, count: int) -> "np.ndarray":
    """Return the tokens of the first `count` samples, int64."""
    import numpy as np  # slow import, needed by few plans

    lengths = (synthetic_length(data, longest, split, index) for index in range(count))
    return np.fromiter(lengths, np.int64, count)
