"""What a run leaves: outcome, record, metrics. Reading them needs neither torch nor Hydra."""

from eke.plan.record import derive, metrics
from eke.plan.record.missing import no_runs
from eke.plan.record.outcome import EXIT_FAILED, EXIT_OK, EXIT_RESUMABLE, EXIT_USER, Outcome
from eke.plan.record.ranks import (
    DeadRank,
    RankFailure,
    read_dead_rank,
    read_rank_failures,
    write_dead_rank,
    write_rank_failure,
)
from eke.plan.record.record import (
    RECORD_LIMIT,
    RECORD_VERSION,
    CalibratedMemory,
    CalibratedStep,
    Failure,
    Loss,
    MeasuredMemory,
    MemoryRecord,
    PredictedMemory,
    PredictedStep,
    Record,
    Spread,
    Throughput,
    Timing,
)
from eke.plan.record.store import (
    UnreadableRecord,
    missing_run,
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
    "RECORD_LIMIT",
    "RECORD_VERSION",
    "CalibratedMemory",
    "CalibratedStep",
    "DeadRank",
    "Failure",
    "Loss",
    "MeasuredMemory",
    "MemoryRecord",
    "Outcome",
    "PredictedMemory",
    "PredictedStep",
    "RankFailure",
    "Record",
    "Spread",
    "Throughput",
    "Timing",
    "UnreadableRecord",
    "derive",
    "metrics",
    "missing_run",
    "no_runs",
    "read_attempts",
    "read_dead_rank",
    "read_rank_failures",
    "read_record",
    "start_attempt",
    "write_dead_rank",
    "write_rank_failure",
    "write_record",
]
