"""A CPU's memory is measured in the step of the longest rows, and compared with its forecast."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import TINY
from trained import record_of, train_job

from eke.plan.planner import MicroBatchShape, simulated_micro_batches
from eke.training.loop.results import measured_memory

TYPED = (
    *TINY,
    "data=synthetic",
    "data.lengths=lognormal",
    "data.seq_len=96",
    "data.median_len=12",
    "data.num_samples=64",
    "data.num_eval_samples=2",
    "batch.per_device=4",
    "train.steps=14",
    "train.checkpoint_every=null",
    "train.save_final=false",
)


@pytest.mark.parametrize("more", [(), ("data.packing=padding_free",)], ids=["padded", "free"])
def test_forecast_is_of_the_profiled_step_with_longest_rows(more, make_plan, tmp_path) -> None:
    job = train_job(make_plan(*TYPED, *more), tmp_path / "run")
    steps = list(job.data.train_steps(0))
    tokens = [max(batch.size.tokens for batch in cut) for cut in steps]
    assert job.longest == 1 + int(np.argmax(tokens[1:]))
    assert job.longest > 1, "or this shows nothing"
    assert job.profiled == max((b.size for b in steps[job.longest]), key=lambda size: size.tokens)
    record = record_of(job)
    measured = record.memory.measured.peak_allocated_bytes
    predicted = record.memory.predicted.allocated_bytes
    assert predicted == pytest.approx(measured, rel=0.2)
    longest = simulated_micro_batches(job.plan).longest
    job.profiled = MicroBatchShape(longest.rows, longest.source // 3, longest.target // 3)
    assert record_of(job).memory.predicted.allocated_bytes < predicted


@pytest.mark.parametrize(
    ("mine", "peaks", "expected"), [(7, [7, 13], 13), (7, [7, None], 7), (None, None, None)]
)
def test_largest_rank_is_recorded(mine, peaks, expected) -> None:
    job = SimpleNamespace(device=torch.device("cpu"), profiled_peak=mine, peaks=peaks, stages={})
    assert measured_memory(job).peak_allocated_bytes == expected
