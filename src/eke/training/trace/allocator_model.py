"""Models of PyTorch's allocators on a CPU and a GPU."""

import bisect
from dataclasses import dataclass

from eke.common.text import MIB

# Source: c10/cuda/CUDACachingAllocator.h and .cpp, torch 2.13 (kMinBlockSize and following).
_BLOCK_BYTES = 512
_SMALL_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB
_LARGE_SEGMENT_BYTES = 20 * MIB
_LARGE_REQUEST_BYTES = 10 * MIB
_ROUND_LARGE_BYTES = 2 * MIB


class PlainSum:
    """CPU allocator without a cache: each tensor has its own memory."""

    def __init__(self) -> None:
        self.allocated = 0
        self._sizes: dict[int, int] = {}

    @property
    def reserved(self) -> int:
        """Reserved bytes, equal to the allocated bytes."""
        return self.allocated

    def malloc(self, key: int, num_bytes: int) -> None:
        """Add a tensor."""
        self._sizes[key] = num_bytes
        self.allocated += num_bytes

    def free(self, key: int) -> None:
        """Remove a tensor."""
        self.allocated -= self._sizes.pop(key)

    def empty_cache(self) -> None:
        """Do nothing, since there is no cache."""


@dataclass(slots=True, eq=False)
class _Block:
    address: int
    size: int
    small: bool
    segment: int
    """Bytes of its segment."""
    free: bool = True
    before: "_Block | None" = None
    after: "_Block | None" = None


class CachingAllocator:
    """One stream of PyTorch's CUDA caching allocator with its default settings.

    Requests are rounded to 512 bytes. Up to 1 MiB they share segments of 2 MiB, up to 10 MiB
    segments of 20 MiB, and larger ones have their own, rounded to 2 MiB. The smallest sufficient
    free block is used and split, and free neighbours are merged. Source:
    c10/cuda/CUDACachingAllocator.cpp.
    """

    def __init__(self) -> None:
        self.allocated = 0
        self.reserved = 0
        self._top = 0
        self._pools: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        """Free blocks of small and of large segments: (size, address), sorted."""
        self._blocks: dict[int, _Block] = {}
        self._used: dict[int, _Block] = {}

    def malloc(self, key: int, num_bytes: int) -> None:
        """Use a cached block or a new segment."""
        size = max(-(-num_bytes // _BLOCK_BYTES), 1) * _BLOCK_BYTES
        small = size <= _SMALL_BYTES
        pool = self._pools[small]
        found = bisect.bisect_left(pool, (size, 0))
        if found < len(pool):
            block = self._blocks[pool.pop(found)[1]]
        else:
            block = self._new_segment(size, small)
        remaining = block.size - size
        if remaining >= _BLOCK_BYTES if small else remaining > _SMALL_BYTES:
            self._split(block, size)
        block.free = False
        self._used[key] = block
        self.allocated += block.size

    def free(self, key: int) -> None:
        """Return a block to the cache, merged with free neighbours."""
        block = self._used.pop(key)
        self.allocated -= block.size
        block.free = True
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                self._pools[block.small].remove((neighbour.size, neighbour.address))
                block = self._merge(block, neighbour)
        bisect.insort(self._pools[block.small], (block.size, block.address))

    def empty_cache(self) -> None:
        """Return unused segments to the driver."""
        for pool in self._pools.values():
            for size, address in list(pool):
                block = self._blocks[address]
                if block.size == block.segment:
                    pool.remove((size, address))
                    del self._blocks[address]
                    self.reserved -= size

    def _new_segment(self, size: int, small: bool) -> _Block:
        segment = SMALL_SEGMENT_BYTES if small else _LARGE_SEGMENT_BYTES
        if size >= _LARGE_REQUEST_BYTES:
            segment = -(-size // _ROUND_LARGE_BYTES) * _ROUND_LARGE_BYTES
        block = _Block(self._top, segment, small, segment)
        self._top += segment
        self._blocks[block.address] = block
        self.reserved += segment
        return block

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.address + size, block.size - size, block.small, block.segment)
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.size, block.after = size, rest
        self._blocks[rest.address] = rest
        bisect.insort(self._pools[rest.small], (rest.size, rest.address))

    def _merge(self, one: _Block, other: _Block) -> _Block:
        first, second = sorted((one, other), key=lambda block: block.address)
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        first.free = True
        del self._blocks[second.address]
        return first
