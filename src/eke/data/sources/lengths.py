"""Lengths of synthetic samples: functions of the seed and the sample's number, without torch."""

import hashlib
import math
from statistics import NormalDist
from typing import TYPE_CHECKING

from eke.config.schema import Lengths, Synthetic

if TYPE_CHECKING:
    import numpy as np

_LENGTH = 2
"""Purpose of the random number, beside a sample's tokens (0) and its label (1)."""


def mix_seed(*parts: int) -> int:
    """One 63-bit seed from several numbers."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def shortest(data: Synthetic) -> int:
    """Fewest tokens of a sample."""
    if data.lengths is Lengths.uniform:
        return data.min_len or max(2, data.seq_len // 2)
    return data.min_len or 2


def median(data: Synthetic) -> int:
    """Median of lognormal lengths before clipping."""
    return data.median_len or max(2, data.seq_len // 4)


def synthetic_length(data: Synthetic, longest: int, split: int, index: int) -> int:
    """Tokens of one sample.

    Args:
        data: its distribution.
        longest: tokens of the longest sample (source and target together in seq2seq).
        split: 0 training, 1 evaluation.
        index: number of the sample.
    """
    if data.lengths is Lengths.fixed:
        return longest
    share = (mix_seed(data.data_seed, split, index, _LENGTH) + 0.5) / 2**63
    low = shortest(data)
    assert low <= longest, "a rule refuses it"
    if data.lengths is Lengths.uniform:
        return min(longest, low + int(share * (longest - low + 1)))
    # 2**63 shares leave room for +-9 standard deviations; rounding may make the last one 1.0.
    share = min(max(share, 2**-53), 1 - 2**-53)
    drawn = median(data) * math.exp(data.sigma * NormalDist().inv_cdf(share))
    return round(min(max(drawn, low), longest))


def synthetic_lengths(data: Synthetic, longest: int, split: int, count: int) -> "np.ndarray":
    """Tokens of the first `count` samples, int64."""
    import numpy as np  # a tenth of a plan's time, and few plans need it

    lengths = (synthetic_length(data, longest, split, index) for index in range(count))
    return np.fromiter(lengths, np.int64, count)
