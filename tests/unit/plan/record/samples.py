"""Rows and records for the tests of the core."""

import dataclasses
from typing import Any

from eke.plan.record import (
    Failure,
    Loss,
    MeasuredMemory,
    MemoryRecord,
    PredictedMemory,
    Record,
    Spread,
    Throughput,
    Timing,
    metrics,
)


def step_row(step: int, attempt: int = 0, seconds: float = 0.1, **more: Any) -> metrics.Row:
    """The row of one training step of 8 samples and 100 tokens; a tenth of its time is loading."""
    row: metrics.Row = {
        metrics.STEP: step,
        metrics.ATTEMPT: attempt,
        metrics.LOSS: 4.0 / step,
        metrics.STEP_TIME: seconds,
        metrics.SAMPLES: 8,
        metrics.TOKENS: 100,
        metrics.PHASE_KEYS["data"]: 0.1 * seconds,
        metrics.PHASE_KEYS["forward"]: 0.3 * seconds,
        metrics.PHASE_KEYS["backward"]: 0.5 * seconds,
        metrics.PHASE_KEYS["optimizer"]: 0.1 * seconds,
    }
    return row | more


def eval_row(step: int, loss: float, attempt: int = 0, **more: Any) -> metrics.Row:
    """The row of one evaluation."""
    return {metrics.STEP: step, metrics.ATTEMPT: attempt, metrics.EVAL_LOSS: loss} | more


def bare_record(**changes: Any) -> Record:
    """A record in which nothing was measured."""
    record = Record(
        run_id="0123456789abcdef",
        name="precision=bf16",
        outcome="ok",
        exit_code=0,
        attempt=0,
        steps_done=0,
        config={"seed": 0},
        choices={"precision": "bf16"},
        overrides=["precision=bf16"],
        plan={"steps": {"total": 300}},
        machine={"device": "test cpu", "torch": "2.13.0"},
        environment={"host": "node1"},
        command=["python", "train.py", "precision=bf16"],
    )
    return dataclasses.replace(record, **changes)


def full_record(**changes: Any) -> Record:
    """A record in which everything was measured."""
    measured = {
        "steps_done": 300,
        "timing": Timing(
            startup_s=3.2,
            compile_s=12.0,
            train_s=31.4,
            eval_s=1.25,
            checkpoint_s=0.3,
            steady_step_s=Spread(0.1, 0.09, 0.12, 295),
            warmup_steps_s=[1.0, 0.2, 0.1, 0.1, 0.1],
            phases={
                "data": Spread(0.01, 0.01, 0.01, 295),
                "forward": Spread(0.03, 0.03, 0.03, 295),
                "backward": Spread(0.05, 0.05, 0.05, 295),
                "optimizer": Spread(0.01, 0.01, 0.01, 295),
            },
        ),
        "throughput": Throughput(80.0, 20480.0, 1.5e12, 0.375, "6 x parameters x tokens"),
        "memory": MemoryRecord(
            predicted=PredictedMemory(2**29, 2**30, 2**31, {"weights": 2**28}),
            measured=MeasuredMemory(
                basis="CUDA caching allocator, whole run; stages: memory in use on the GPU (NVML)",
                peak_allocated_bytes=3 * 2**30,
                peak_reserved_bytes=4 * 2**30,
                process_peak_bytes=2**31,
                stages={"empty": 0, "kernels_loaded": 2**29, "weights": 2**30, "training": 2**32},
            ),
        ),
        "loss": Loss(5.75, 2.25, 5.8, 2.5, 8.368, 3.607),
        "effective": {
            "matmul_dtypes": ["bfloat16", "float32"],
            "attention_kernels": ["flash"],
            "layer_calls_per_micro_batch": 2.0,
            "layers_recomputed": 12,
            "operations_recomputed_per_micro_batch": 804.0,
            "matmuls_recomputed_per_micro_batch": 84.0,
            "optimizer": "AdamW",
            "optimizer_implementation": "fused",
            "optimizer_bytes_per_parameter": 8.0,
        },
        "warnings": ["train.steps = 5: no speed will be reported"],
        "shared_device": False,
    }
    return dataclasses.replace(bare_record(), **(measured | changes))


def failed(outcome: str, phase: str = "forward", message: str = "it broke") -> Record:
    """A record of a run that did not end well."""
    from eke.plan.record import Outcome

    return bare_record(
        outcome=outcome,
        exit_code=Outcome(outcome).exit_code,
        failure=Failure(phase, message, "Traceback ..."),
    )
