"""What a plan prints of its sizes."""

import pytest
from unit.plan.cases import SYNTHETIC, plan_of

from eke.plan.planner.plan import render_plan


@pytest.mark.parametrize(
    ("length", "samples", "epochs"),
    [
        ("train.epochs=2", "240", "2.00"),  # 7 steps of 16 and one of 8, twice
        ("train.epochs=1", "120", "1.00"),
        ("train.steps=8", "120", "1.00"),
        ("train.steps=7", "112", "0.93"),
        ("train.steps=11", "168", "1.40"),
    ],
)
def test_last_step_of_an_epoch_has_the_remaining_samples(length, samples, epochs) -> None:
    plan = plan_of(*SYNTHETIC, "data.num_samples=120", "batch.per_device=16", length)
    (row,) = [line for line in render_plan(plan).splitlines() if "total samples" in line]
    assert row.split()[2:4] == [samples, epochs]
