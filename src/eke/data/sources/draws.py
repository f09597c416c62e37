"""Draws from the sources of a mix, by weight."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eke.data.sources.packing import mix_seed

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Draws:
    """Draws from several sources, a function of the seed and their number.

    Draw n of a source with share p is due at (n + u) / p, where the seed and n give u in [0, 1). In
    this order any m draws in a row have m p of the source, give or take the number of sources. Each
    source's draws run through all of its samples, in a new order each time.
    """

    sizes: tuple[int, ...]
    """Samples of each source."""
    shares: tuple[float, ...]
    """Expected fraction of the draws from each; their sum is 1."""
    seed: int
    streams: tuple[bool, ...] = ()
    """Whether the samples of each source come in their own order; False for all where empty."""

    def take(self, first: int, count: int) -> "tuple[np.ndarray, np.ndarray]":
        """Epoch and sample number (going on from source to source) of draws from `first` on."""
        import numpy as np  # slow import, needed by few plans

        # Before a time t, t draws are due, give or take the number of sources.
        begin, end = max(0, first - len(self.sizes)), first + count + len(self.sizes)
        each = [self._due(source, begin, end) for source in range(len(self.sizes))]
        times, epochs, numbers = (np.concatenate([e[part] for e in each]) for part in range(3))
        skipped = first - sum(passed for *_, passed in each)
        chosen = np.argsort(times, kind="stable")[skipped : skipped + count]
        return epochs[chosen], numbers[chosen]

    def _due(self, source: int, begin: int, end: int) -> "tuple[Any, Any, Any, int]":
        """Time, epoch and sample of what a source gives in a time, and the draws before it."""
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
        """64 bits for each number, by splitmix64 (Steele et al. 2014)."""
        z = numbers.astype("uint64") * 0x9E3779B97F4A7C15 + mix_seed(self.seed, source, purpose)
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB
        return z ^ (z >> 31)
