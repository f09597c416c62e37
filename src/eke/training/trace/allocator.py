"""Models of memory allocators: what they hold for the tensors that live, byte by byte."""

import bisect
from typing import Protocol

MIB = 2**20

# Source of these: c10/cuda/CUDACachingAllocator.h and .cpp, torch 2.13 (kMinBlockSize and on).
BLOCK_BYTES = 512
SMALL_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
LARGE_REQUEST_BYTES = 10 * MIB
ROUND_LARGE_BYTES = 2 * MIB


class Allocator(Protocol):
    """Hands out and takes back memory; counts bytes."""

    @property
    def allocated(self) -> int:
        """Sum of what is handed out, as the allocator itself rounds it."""

    @property
    def reserved(self) -> int:
        """Sum of what the allocator has from the device."""

    def malloc(self, key: int, num_bytes: int) -> None:
        """Hand out memory under a key."""

    def free(self, key: int) -> None:
        """Take it back."""

    def empty_cache(self) -> None:
        """Give unused memory back to the device."""


class PlainSum:
    """The CPU's: each tensor has its own memory, and nothing is kept."""

    def __init__(self) -> None:
        self._allocated = 0
        self._sizes: dict[int, int] = {}

    @property
    def reserved(self) -> int:
        """The same as allocated."""
        return self._allocated

    @property
    def allocated(self) -> int:
        """Sum of tensors."""
        return self._allocated

    def malloc(self, key: int, num_bytes: int) -> None:
        """Counted as it is."""
        self._sizes[key] = num_bytes
        self._allocated += num_bytes

    def free(self, key: int) -> None:
        """Gone at once."""
        self._allocated -= self._sizes.pop(key)

    def empty_cache(self) -> None:
        """Nothing is kept that could be given back."""


class _Block:
    """A stretch of a segment, between two neighbours."""

    __slots__ = ("address", "after", "before", "free", "segment", "size", "small")

    def __init__(self, address: int, size: int, small: bool, segment: int) -> None:
        self.address = address
        self.size = size
        self.small = small
        self.segment = segment
        """Bytes of the segment it lies in."""
        self.free = True
        self.before: _Block | None = None
        self.after: _Block | None = None


class CachingAllocator:
    """One stream of PyTorch's CUDA caching allocator with its default settings.

    Requests are rounded to 512 bytes. Up to 1 MiB they come out of segments of 2 MiB, up to 10 MiB
    out of segments of 20 MiB, larger ones have segments of their own, rounded to 2 MiB. The
    smallest free block that is large enough is taken (best fit; of equals the lowest address), and
    split where enough is left; free neighbours are merged.
    Source: c10/cuda/CUDACachingAllocator.cpp.
    """

    def __init__(self) -> None:
        self._allocated = 0
        self._reserved = 0
        self._top = 0
        self._pools: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        """Free blocks of small and of large segments: (size, address), sorted."""
        self._blocks: dict[int, _Block] = {}
        """By address."""
        self._used: dict[int, _Block] = {}

    @property
    def allocated(self) -> int:
        """Sum of blocks in use."""
        return self._allocated

    @property
    def reserved(self) -> int:
        """Sum of segments."""
        return self._reserved

    def malloc(self, key: int, num_bytes: int) -> None:
        """Take a cached block, or a new segment."""
        size = max(-(-num_bytes // BLOCK_BYTES), 1) * BLOCK_BYTES
        small = size <= SMALL_BYTES
        pool = self._pools[small]
        found = bisect.bisect_left(pool, (size, 0))
        if found < len(pool):
            block = self._blocks[pool.pop(found)[1]]
        else:
            block = self._new_segment(size, small)
        remaining = block.size - size
        if remaining >= BLOCK_BYTES if small else remaining > SMALL_BYTES:
            self._split(block, size)
        block.free = False
        self._used[key] = block
        self._allocated += block.size

    def free(self, key: int) -> None:
        """Back into the cache, merged with free neighbours."""
        block = self._used.pop(key)
        self._allocated -= block.size
        block.free = True
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                self._pools[block.small].remove((neighbour.size, neighbour.address))
                block = self._merge(block, neighbour)
        bisect.insort(self._pools[block.small], (block.size, block.address))

    def empty_cache(self) -> None:
        """Segments that nothing lives in go back to the driver."""
        for pool in self._pools.values():
            for size, address in list(pool):
                block = self._blocks[address]
                if block.size == block.segment:
                    pool.remove((size, address))
                    del self._blocks[address]
                    self._reserved -= size

    def _new_segment(self, size: int, small: bool) -> _Block:
        if small:
            segment = SMALL_SEGMENT_BYTES
        elif size < LARGE_REQUEST_BYTES:
            segment = LARGE_SEGMENT_BYTES
        else:
            segment = -(-size // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES
        block = _Block(self._top, segment, small, segment)
        self._top += segment
        self._blocks[block.address] = block
        self._reserved += segment
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
