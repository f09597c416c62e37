"""When waiting for data is worth a word, and which."""

import dataclasses

import pytest
from unit.plan.cases import SYNTHETIC, plan_of

from eke.plan.planner import outline_record
from eke.plan.planner.planner import MIN_STEPS, WORTH_SAYING_FRAC, waiting_hints
from eke.plan.record import Outcome, metrics


def rows(data_s: float, other_s: float = 1.0, num: int = MIN_STEPS):
    phases = dict.fromkeys(metrics.PHASES, 0.0) | {"data": data_s, "forward": other_s}
    return [
        {
            metrics.STEP: step + 1,
            metrics.ATTEMPT: 0,
            metrics.LOSS: 1.0,
            metrics.STEP_TIME: data_s + other_s,
            metrics.SAMPLES: 1,
            metrics.TOKENS: 1,
            **{metrics.PHASE_KEYS[phase]: seconds for phase, seconds in phases.items()},
        }
        for step in range(num)
    ]


def hints(plan, **made) -> list[str]:
    return waiting_hints(plan, metrics.timing(rows(**made)))


@pytest.fixture
def eight_cores(monkeypatch):
    monkeypatch.setattr("eke.plan.planner.planner.usable_cores", lambda: 8)


def test_waiting_share_is_of_steady_steps() -> None:
    warm_up = {**rows(9.0)[0], metrics.WARMUP: 1}
    assert metrics.timing([warm_up, *rows(1.0, 3.0)[1:]]).data_frac == 0.25
    assert metrics.timing([warm_up]).data_frac is None


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        ((), "(dataloader=workers)"),
        (("dataloader=workers",), "(dataloader.workers=4)"),
        (("dataloader=workers", "dataloader.workers=4"), "(dataloader.workers=8)"),
    ],
)
def test_helpful_override_is_named(typed, fix, eight_cores) -> None:
    (hint,) = hints(plan_of(*SYNTHETIC, *typed), data_s=1.0, other_s=3.0)
    assert hint == f"25% of the step time was spent waiting for data {fix}"


def test_override_is_omitted_if_all_cores_are_used(eight_cores) -> None:
    plan = plan_of(*SYNTHETIC, "dataloader=workers", "dataloader.workers=5")
    (hint,) = hints(plan, data_s=1.0)
    assert hint.endswith("8 cores are too few for more than 5 loader processes)")


def test_small_share_or_few_steps_give_no_hint() -> None:
    plan = plan_of(*SYNTHETIC)
    below, above = WORTH_SAYING_FRAC * 0.9, WORTH_SAYING_FRAC * 1.3
    assert hints(plan, data_s=below) == []
    assert len(hints(plan, data_s=above)) == 1
    assert hints(plan, data_s=above, num=MIN_STEPS - 1) == []


def test_record_has_waiting_share_and_hint() -> None:
    plan = dataclasses.replace(plan_of(*SYNTHETIC), warnings=("first",))
    record = outline_record(plan, rows(1.0), 0, Outcome.ok, None)
    assert record.timing.data_frac == 0.5
    assert record.warnings[0] == "first"
    assert "dataloader=workers" in record.warnings[1]
