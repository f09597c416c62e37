"""Training state in files: what lies on the disk, and the host memory it passes through.

Formulas follow deepspeed 0.19.8 (`runtime/swap_tensor`, `runtime/zero/stage3.py`) for float32
weights: a role's weights are cut between processes and joined to pieces; a piece, its moments and
the gradients of its larger weights are one file each. Small pieces and weights stay in host memory.
"""

from dataclasses import dataclass
from math import prod

from eke.config.schema import Config, NvmeOffload, WeightsPlace
from eke.models.sizes.measure import training_structure
from eke.models.sizes.optimizer_descriptions import FLOAT32_BYTES
from eke.models.sizes.structure import Role

MIN_FILE_BYTES = 2**20
"""Smaller tensors are never written: `MIN_AIO_BYTES`."""

ALIGNED_BYTES = 1024
"""A file is a multiple of this per thread: `AIO_ALIGNED_BYTES`."""

PIECE_BUFFERS = 4
"""Pinned buffers of a piece's size: weights, gradient and AdamW's two moments (`buffer_count`)."""

WEIGHT_BUFFERS = 5
"""Pinned buffers of the largest weight's size, for weights on the disk (`buffer_count`)."""


@dataclass(frozen=True)
class SwapBytes:
    """Bytes of one process."""

    optimizer_files: int
    """Pieces, their moments and gradients."""
    weight_files: int
    """Weights that the model computes with; 0 where they do not wait on the disk."""
    optimizer_memory: int
    """Host memory: buffers, and the pieces and moments that are too small for a file."""
    weight_memory: int
    """Host memory for weights: buffers, and weights too small for a file; 0 where none is on the
    disk."""
    pinned: int
    """Of the host memory, buffers that must be locked (`ulimit -l`)."""

    @property
    def files(self) -> int:
        """All that lies on the disk."""
        return self.optimizer_files + self.weight_files


def swap_bytes(config: Config, num_moments: int) -> SwapBytes:
    """What one process keeps where; exact while no role has more numbers than a piece may.

    A role with more is cut in the model's order, which sizes do not know: its pieces are taken to
    be full, and the last one to be large enough for a file.

    Args:
        config: with `offload=nvme` and `distributed=zero3`.
        num_moments: tensors the optimizer keeps per weight: two for AdamW.
    """
    offload = config.offload
    assert isinstance(offload, NvmeOffload), "state in memory has no files"
    processes = config.distributed.num_processes
    trained = [w for w in training_structure(config).weights if w.trained]
    parts = {
        role: [-(-prod(w.shape) // processes) for w in trained if w.role is role] for role in Role
    }
    numbers = {role: sum(mine) for role, mine in parts.items()}
    on_disk = [role for role in Role if is_file(offload, numbers[role])]
    gradients = [part for role in on_disk for part in parts[role] if is_file(offload, part)]
    copies = 1 + num_moments
    kept = sum(numbers[role] for role in Role if role not in on_disk)
    buffers = PIECE_BUFFERS * _aligned(offload, _largest_piece(offload, parts))
    weight_files, weight_kept, weight_buffers = 0, 0, 0
    if offload.weights is WeightsPlace.disk:
        all_parts = [part for mine in parts.values() for part in mine]
        filed = [part for part in all_parts if is_file(offload, part)]
        weight_files = sum(_aligned(offload, part) for part in filed)
        weight_kept = sum(all_parts) - sum(filed)
        weight_buffers = WEIGHT_BUFFERS * _aligned(offload, largest_part(config))
        weight_buffers += _way_back(config, offload, parts)
    return SwapBytes(
        optimizer_files=FLOAT32_BYTES
        * (
            copies * sum(_aligned(offload, numbers[role]) for role in on_disk)
            + sum(_aligned_down(offload, part) for part in gradients)
        ),
        weight_files=FLOAT32_BYTES * weight_files,
        optimizer_memory=FLOAT32_BYTES * (buffers + copies * kept),
        weight_memory=FLOAT32_BYTES * (weight_buffers + weight_kept),
        pinned=FLOAT32_BYTES * (buffers + weight_buffers),
    )


def is_file(offload: NvmeOffload, numbers: int) -> bool:
    """Whether a float32 tensor of so many numbers is written to the disk at all."""
    return numbers * FLOAT32_BYTES >= max(MIN_FILE_BYTES, offload.block_bytes)


def largest_part(config: Config) -> int:
    """Numbers of the largest weight that one process holds."""
    processes = config.distributed.num_processes
    return max(-(-prod(w.shape) // processes) for w in training_structure(config).weights)


def _largest_piece(offload: NvmeOffload, parts: dict[Role, list[int]]) -> int:
    """At most: a piece is closed by the weight that fills it."""
    return max(
        min(sum(mine), offload.piece_numbers + max(mine, default=0) - 1) for mine in parts.values()
    )


def _way_back(config: Config, offload: NvmeOffload, parts: dict[Role, list[int]]) -> int:
    """Numbers of the buffer that takes a piece's weights back to the disk.

    DeepSpeed makes it as large as the uncut weights of the largest piece: more than it needs.
    """
    largest = max(Role, key=lambda role: sum(parts[role]))
    trained = [w for w in training_structure(config).weights if w.trained and w.role is largest]
    whole = [_aligned(offload, prod(w.shape)) for w in trained]
    return min(sum(whole), offload.piece_numbers * config.distributed.num_processes + max(whole))


def _unit(offload: NvmeOffload) -> int:
    return ALIGNED_BYTES * offload.threads // FLOAT32_BYTES


def _aligned(offload: NvmeOffload, numbers: int) -> int:
    unit = _unit(offload)
    return -(-numbers // unit) * unit


def _aligned_down(offload: NvmeOffload, numbers: int) -> int:
    """The rest of a gradient stays in host memory."""
    unit = _unit(offload)
    return numbers // unit * unit
