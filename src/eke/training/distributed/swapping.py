"""Training state that DeepSpeed keeps in files: told where, and brought into memory.

Between steps the tensors of such a state are empty; DeepSpeed fills them piece by piece
(deepspeed 0.19.8, `runtime/zero/stage3.py` and `runtime/swap_tensor`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from eke.common.files import own_folder
from eke.training.distributed.operators import load_files

Engine = Any
"""`deepspeed.DeepSpeedEngine`, which has no type annotations."""


def prepare_swap(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """DeepSpeed's settings with this run's folder, and the operator that writes into it built."""
    own_folder(folder)
    load_files()
    zero = {
        key: {**value, "nvme_path": str(folder)}
        if isinstance(value, dict) and "nvme_path" in value
        else value
        for key, value in settings["zero_optimization"].items()
    }
    return {**settings, "zero_optimization": zero}


def piece_lengths(engine: Engine) -> list[int]:
    """Numbers in each of this rank's flat pieces, which are empty while they lie in a file."""
    return [int(length) for length in engine.optimizer.fp16_partitioned_groups_flat_numel]


def in_files(engine: Engine, piece: int) -> bool:
    """Whether this piece and its moments are in files between steps."""
    swappable = getattr(engine.optimizer, "_swappable_optimizer_subgroup", None)  # stage 3 has it
    return swappable is not None and bool(swappable(piece))


@contextmanager
def in_memory(engine: Engine, piece: int, write: bool = False) -> Iterator[bool]:
    """The piece and its moments in memory; yields whether they are there for the while only.

    Args:
        engine: of any stage.
        piece: its number.
        write: put them back into the files afterwards.
    """
    if not in_files(engine, piece):
        yield False
        return
    engine.optimizer._optimizer_states_and_gradient_swap_in(piece)
    try:
        yield True
    finally:
        if write:
            engine.optimizer._optimizer_states_and_gradient_swap_out(piece)
        else:
            engine.optimizer._release_swap_buffers(piece)


def swap_buffers(engine: Engine) -> tuple[list[Tensor], list[Tensor]]:
    """Buffers in host memory that optimizer state and weights pass through."""
    swapper = getattr(engine.optimizer, "optimizer_swapper", None)
    mine = list(swapper.swap_buffer_manager.all_buffers) if swapper is not None else []
    weights = (getattr(p, "nvme_swapper", None) for p in engine.module.parameters())
    reader = next((found for found in weights if found is not None), None)
    if reader is None:
        return mine, []
    back = reader.partitioned_swap_buffer
    return mine, [reader.buffers, *([back] if back is not None else [])]
