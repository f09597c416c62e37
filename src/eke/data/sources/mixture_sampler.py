"""Weighted draws from the sources of a mix."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eke.data.sources.packing import mix_seed

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class MixtureSampler:
    """Draws from several sources, determined by the seed and the draw number.

    Draw n of a source with share p is due at (n + u) / p, where the seed and n give u in [0, 1).
    Any m consecutive draws contain m p of the source, plus or minus the number of sources. A source
    repeats after all its samples are drawn, in a new order.
    """

    sizes: tuple[int, ...]
    """Samples of each source."""
    shares: tuple[float, ...]
    """Expected fraction of draws from each source, the sum is 1."""
    seed: int
    streams: tuple[bool, ...] = ()
    """True if each source keeps the order of its samples, empty: False for all."""

    def take(self, first: int, count: int) -> "tuple[np.ndarray, np.ndarray]":
        """Return epochs and sample numbers (sources concatenated) of `count` draws from `first`."""
        import numpy as np  # slow import, needed by few plans

        # The draws due before a time t number t, plus or minus the number of sources.
        begin, end = max(0, first - len(self.sizes)), first + count + len(self.sizes)
        each = [self._draws_in_range(source, begin, end) for source in range(len(self.sizes))]
        times, epochs, numbers = (np.concatenate([e[part] for e in each]) for part in range(3))
        skipped = first - sum(passed for *_, passed in each)
        chosen = np.argsort(times, kind="stable")[skipped : skipped + count]
        return epochs[chosen], numbers[chosen]

    def _draws_in_range(self, source: int, begin: int, end: int) -> "tuple[Any, Any, Any, int]":
        """Return times, epochs and samples of a source's draws in a range, and the draws before."""
        import numpy as np

        share, size = self.shares[source], self.sizes[source]
        draws = np.arange(max(0, int(begin * share) - 1), int(end * share) + 2)
        # 24 bits: each sum is exact.
        times = (draws + (self._random(source, 0, draws) >> 40) / 2**24) / share
        passed = int(draws[0] + (times < begin).sum())
        due = (times >= begin) & (times < end)
        epochs, places = np.divmod(draws[due], size)
        if any(self.streams[source : source + 1]):
            return times[due], epochs, places + sum(self.sizes[:source]), passed
        whole = np.arange(epochs[0], epochs[-1] + 1) if len(epochs) else epochs
        slots = whole[:, None] * size + np.arange(size)
        orders = np.argsort(self._random(source, 1, slots), axis=1, kind="stable")
        numbers = orders[epochs - epochs[:1], places] + sum(self.sizes[:source])
        return times[due], epochs, numbers, passed

    def _random(self, source: int, purpose: int, numbers: Any) -> Any:
        """Return 64 random bits per number, by splitmix64 (Steele et al. 2014)."""
        z = numbers.astype("uint64") * 0x9E3779B97F4A7C15 + mix_seed(self.seed, source, purpose)
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB
        return z ^ (z >> 31)
