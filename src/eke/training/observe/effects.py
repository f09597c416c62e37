"""What is read from the running objects into the record's `effective`, a file per kind of thing.

Each note writes into `job.effective` what it found, and warns once where an option that was asked
for changed nothing. None of them copies from the configuration what it could have looked at.
"""

from collections.abc import Callable

from eke.training.loop.state import Job
from eke.training.observe.adapters import note_adapters
from eke.training.observe.compiler import note_compiler
from eke.training.observe.deepspeed import note_deepspeed
from eke.training.observe.formats import note_evaluation_formats, note_formats
from eke.training.observe.kernels import note_kernels
from eke.training.observe.loading import note_loading, note_packing
from eke.training.observe.memory_savings import (
    count_optimizer_calls,
    note_cache_release,
    note_offload,
    note_recomputation,
)
from eke.training.observe.sharding import note_copies, note_devices, note_sharding
from eke.training.observe.states import note_states
from eke.training.observe.trainer import note_engine
from eke.training.observe.transport import note_transport

AFTER_WARM_UP: tuple[Callable[[Job], None], ...] = (
    note_states,
    note_formats,
    note_adapters,
    note_offload,
    note_loading,
    note_sharding,
    note_deepspeed,
    note_devices,
    note_copies,
    note_compiler,
    note_transport,
    note_engine,
)
"""Asked once, after the second step: gradients have been there and the optimizer has its state."""

AT_THE_END: tuple[Callable[[Job], None], ...] = (note_cache_release, note_packing)
"""Asked once, after training, however it ended."""

__all__ = [
    "AFTER_WARM_UP",
    "AT_THE_END",
    "count_optimizer_calls",
    "note_evaluation_formats",
    "note_kernels",
    "note_recomputation",
]
