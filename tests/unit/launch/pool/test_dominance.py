"""What can only need more memory than a run that ran out of it is skipped, and nothing else."""

import dataclasses
from collections import deque

import pytest
from unit.plan.cases import SYNTHETIC, plan_of

from eke.launch.processes.sweep_scheduler import needs_at_least, smallest_first
from eke.plan.record import Outcome

BASE = (*SYNTHETIC, "batch.per_device=4")


@pytest.mark.parametrize(
    ("here", "needs_more"),
    [
        (("batch.per_device=8", "optimizer.lr=1e-4"), True),
        (("batch.per_device=2",), False),
        (("data.seq_len=64",), True),
        (("data.seq_len=16",), False),
        (("model.num_hidden_layers=9",), True),
        (("batch.per_device=8", "data.seq_len=16"), False),
        (("optimizer=adafactor", "batch.per_device=8"), False),
        (("precision=bf16",), False),
        (("batch.per_device=8", "memory=checkpointing"), False),
        (("batch.accumulation=2",), True),
        (("batch.accumulation=2", "batch.per_device=2", "seed=1"), False),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else None,
)
def test_memory_order_of_runs(here, needs_more) -> None:
    typed = {o.split("=")[0]: o for o in (*BASE, "data.seq_len=32")}
    failed = plan_of(*typed.values())
    other = plan_of(*{**typed, **{o.split("=")[0]: o for o in here}}.values())
    assert bool(needs_at_least(other, failed)) is needs_more


@pytest.mark.parametrize(
    ("failed", "here", "needs_more"),
    [
        ("memory=checkpointing", "memory=none", True),
        ("precision=bf16", "precision=fp32", False),
    ],
)
def test_memory_order_of_techniques(failed, here, needs_more) -> None:
    assert bool(needs_at_least(plan_of(*BASE, here), plan_of(*BASE, failed))) is needs_more


def test_oom_with_accumulation_does_not_exclude_one_micro_batch() -> None:
    """The same samples at once may need less: a Llama of 1B by 2.3 GiB (notes/lab/recipes.md)."""
    twice = plan_of(*BASE, "batch.accumulation=2")
    assert not needs_at_least(plan_of(*SYNTHETIC, "batch.per_device=8"), twice)
    more = plan_of(*SYNTHETIC, "batch.per_device=8", "batch.accumulation=2")
    assert needs_at_least(more, twice)


def test_runs_are_ordered_by_memory_within_their_round(make_jobs) -> None:
    """In the places that those of the first round had; nothing else moves."""
    jobs = make_jobs(1, 1, 1, 1, 1)
    for job, repeat in zip(jobs, (0, 0, 0, 0, 1), strict=True):
        config = dataclasses.replace(job.plan.config, repeat=repeat)
        job.plan = dataclasses.replace(job.plan, config=config)
    needs = dict(zip((job.plan.run_id for job in jobs), (30, None, 10, 20, 1), strict=True))
    ordered = smallest_first(jobs, lambda plan: needs[plan.run_id])
    assert [job.plan.run_id for job in ordered] == ["c", "b", "d", "a", "e"]
    assert [job.plan.run_id for job in jobs] == ["a", "b", "c", "d", "e"]
    assert smallest_first([], lambda plan: None) == []


def test_oom_with_16_bit_weights_excludes_32_bit_weights() -> None:
    narrow = plan_of(*BASE, "precision=bf16_pure", "optimizer=sgd", "optimizer.momentum=0")
    wide = plan_of(*BASE, "precision=fp32", "optimizer=sgd", "optimizer.momentum=0")
    assert narrow.compute.weights == "bfloat16"
    if narrow.compute.master:
        assert not needs_at_least(wide, narrow), "its float32 copies may be what did not fit"
    else:
        assert needs_at_least(wide, narrow)


def test_pool_skips_larger_runs_after_oom(make_jobs, make_pool, machine, gpus) -> None:
    jobs = make_jobs(1, 1, 1)
    sizes = {"a": 4, "b": 8, "c": 2}
    for job in jobs:
        batch = dataclasses.replace(job.plan.batch, per_device=sizes[job.plan.run_id])
        job.plan = dataclasses.replace(job.plan, batch=batch)
    machine.ends["a"] = deque([("oom", 0, 0)])
    make_pool(jobs, gpus(1)).wait()
    assert [job.outcome for job in jobs] == [Outcome.oom, Outcome.skipped, Outcome.ok]
    assert "batch.per_device=8" in jobs[1].reason


def test_oom_on_a_shared_device_skips_no_run(make_jobs, make_pool, machine, gpus) -> None:
    jobs = make_jobs(1, 1)
    machine.ends["a"] = deque([("oom", 0, 0)])
    pool = make_pool(jobs, gpus(1))
    start = pool.start

    def shared(plan, place, grant):
        run = start(plan, place, grant)
        run.record.shared_device = True
        return run

    pool.start = shared
    pool.wait()
    assert [job.outcome for job in jobs] == [Outcome.oom, Outcome.ok]
