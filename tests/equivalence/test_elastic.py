"""A run goes on with other numbers of processes, each holding other parts: the curve stays."""

import shutil

import pytest
from equivalence_cases import CASES, RAGGED
from live import curve
from support import TINY, last_wins

from eke.common.paths import RunPaths
from eke.training.checkpoint import newest_complete

BASE = (
    *CASES["causal_lm-llama"], *TINY, *RAGGED, "data.num_samples=48", "schedule=constant",
    "schedule.warmup_steps=1", "train.log_every=1", "train.eval_every=null",
)  # fmt: skip
STEPS = 2
"""Of each number of processes."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("fsdp", (4, 2, 3, 1)),
        ("zero1", (2, 3, 1)),
        ("zero2", (3, 2)),
        ("zero3", (4, 2, 3)),
        ("mixed", (2, 3, 2)),
    ],
)
def test_any_process_count_resumes(
    kind, ranks, make_plan, train_plan, baseline_of, tmp_path
) -> None:
    """Each number is a run of its own here, which finds the checkpoint of the one before."""
    of = {"mixed": ("fsdp", "zero2", "ddp")}.get(kind, (kind,) * len(ranks))
    before, found = None, {}
    for number, (count, option) in enumerate(zip(ranks, of, strict=True), start=1):
        shared = (f"distributed={option}", f"distributed.num_processes={count}")
        plan = make_plan(
            *last_wins(
                *BASE, *(shared if count > 1 or option != "fsdp" else ("distributed=none",)),
                f"batch.per_device={12 // count}", f"train.steps={STEPS * number}",
            )
        )  # fmt: skip
        if before is not None:
            target = tmp_path / "runs" / plan.run_id / "checkpoints"
            target.mkdir(parents=True)
            shutil.copytree(before, target / before.name)
        folder = train_plan(plan)
        found |= dict(enumerate(curve(folder), start=STEPS * number - len(curve(folder)) + 1))
        before = newest_complete(RunPaths(folder).checkpoints)
    whole = baseline_of(*BASE, "batch.per_device=12", f"train.steps={STEPS * len(ranks)}")
    assert sorted(found) == list(range(1, len(whole) + 1))
    for step, (loss, norm) in enumerate(whole, start=1):
        assert found[step] == (pytest.approx(loss, abs=1e-6), pytest.approx(norm, rel=1e-5))
