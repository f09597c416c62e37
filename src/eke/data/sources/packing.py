"""First-fit packing of samples into rows, and lengths of synthetic samples."""

import hashlib
import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

from eke.config.schema import Lengths, Synthetic

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Packs:
    """Assignment of samples to rows."""

    members: "np.ndarray"
    """Sample numbers, grouped by row, int64."""
    offsets: "np.ndarray"
    """Row r holds members offsets[r] to offsets[r + 1], int64."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, number: int) -> "np.ndarray":
        """Sample numbers of one row, in their order."""
        return self.members[self.offsets[number] : self.offsets[number + 1]]


class _Free:
    """Free tokens of every row, as a segment tree of maxima."""

    def __init__(self, capacity: int, count: int) -> None:
        self.capacity = capacity
        self.width = 1
        while self.width < count:
            self.width *= 2
        self.tree = [capacity] * (2 * self.width)

    def take(self, length: int) -> int:
        """Take `length` tokens of the first row that has them; returns the row."""
        tree, node = self.tree, 1
        while node < self.width:
            node *= 2
            if tree[node] < length:
                node += 1
        found = node - self.width
        tree[node] -= length
        while node > 1:
            node //= 2
            tree[node] = max(tree[2 * node], tree[2 * node + 1])
        return found


WINDOW = 1 << 16
"""Samples packed at a time, to bound memory; a row never spans two windows."""


def first_fit(lengths: "np.ndarray", capacity: int) -> Packs:
    """Pack samples of at most `capacity` tokens, each into the first row with room for it.

    Source: Johnson 1973, Near-Optimal Bin Packing Algorithms: at most 1.7 times the fewest rows.
    """
    import numpy as np  # slow import, needed by few plans

    members, sizes = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for start in range(0, len(lengths), WINDOW):
        window = np.asarray(lengths[start : start + WINDOW])
        free = _Free(capacity, len(window))
        rows = np.fromiter((free.take(int(n)) for n in window), np.int64, len(window))
        members.append(start + np.argsort(rows, kind="stable"))
        sizes.append(np.bincount(rows))
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(sizes))]).astype(np.int64)
    return Packs(np.concatenate(members), offsets)


_LENGTH = 2
"""Stream of the random number; 0 is for tokens, 1 for labels."""


def mix_seed(*parts: int) -> int:
    """Combine several numbers into a 63-bit seed."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def shortest(data: Synthetic) -> int:
    """Minimum length of a sample."""
    if data.lengths is Lengths.uniform:
        return data.min_len or max(2, data.seq_len // 2)
    return data.min_len or 2


def median(data: Synthetic) -> int:
    """Median of lognormal lengths before clipping."""
    return data.median_len or max(2, data.seq_len // 4)


def synthetic_length(data: Synthetic, longest: int, split: int, index: int) -> int:
    """Tokens of a sample of the training (0) or evaluation split (1); `longest` is the maximum."""
    if data.lengths is Lengths.fixed:
        return longest
    share = (mix_seed(data.data_seed, split, index, _LENGTH) + 0.5) / 2**63
    low = shortest(data)
    assert low <= longest, "a rule rejects it"
    if data.lengths is Lengths.uniform:
        return min(longest, low + int(share * (longest - low + 1)))
    # 2**63 shares leave room for +-9 standard deviations; rounding may make the last one 1.0.
    share = min(max(share, 2**-53), 1 - 2**-53)
    drawn = median(data) * math.exp(data.sigma * NormalDist().inv_cdf(share))
    return round(min(max(drawn, low), longest))


def synthetic_lengths(data: Synthetic, longest: int, split: int, count: int) -> "np.ndarray":
    """Tokens of the first `count` samples, int64."""
    import numpy as np  # slow import, needed by few plans

    lengths = (synthetic_length(data, longest, split, index) for index in range(count))
    return np.fromiter(lengths, np.int64, count)
