"""What a run leaves: outcome, record, metrics. Reading them needs neither torch nor Hydra."""

from eke.record import derive, metrics
from eke.record.outcome import EXIT_FAILED, EXIT_OK, EXIT_RESUMABLE, EXIT_USER, Outcome
from eke.record.record import (
    RECORD_VERSION,
    Failure,
    Loss,
    MeasuredMemory,
    MemoryRecord,
    PredictedMemory,
    Record,
    Spread,
    Throughput,
    Timing,
)
from eke.record.store import (
    UnreadableRecord,
    read_attempts,
    read_record,
    start_attempt,
    write_record,
)

__all__ = [
    "EXIT_FAILED",
    "EXIT_OK",
    "EXIT_RESUMABLE",
    "EXIT_USER",
    "RECORD_VERSION",
    "Failure",
    "Loss",
    "MeasuredMemory",
    "MemoryRecord",
    "Outcome",
    "PredictedMemory",
    "Record",
    "Spread",
    "Throughput",
    "Timing",
    "UnreadableRecord",
    "derive",
    "metrics",
    "read_attempts",
    "read_record",
    "start_attempt",
    "write_record",
]
