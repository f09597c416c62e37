"""The axes of a run at W&B: seconds and tokens of its training steps, whatever lies between."""

from pathlib import Path
from typing import Any

import pytest

from eke.plan.record import metrics
from eke.results.trackers.async_tracker import TIME, TOTAL_TOKENS, Totals, drawn


def row(step: int, seconds: float | str = 0.5, attempt: int = 0) -> dict[str, Any]:
    return {"train/global_step": step, "attempt": attempt, "train/step_time_s": seconds}


def evaluation(step: int, attempt: int = 0) -> dict[str, Any]:
    return {"train/global_step": step, "attempt": attempt, "eval/loss": 1.0}


def times(rows: list[Any]) -> list[float]:
    return [each[TIME] for each in rows if TIME in each]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_training_time_accumulates_over_batches(file):
    clock = Totals(file, 0)
    assert times(clock.add([row(1), row(2, 1.0)])) == [0.5, 1.5]
    assert times(clock.add([row(3)])) == [2.0]
    given = [evaluation(0), row(1), evaluation(1)]
    assert Totals(file, 0).add(given) == [given[0], {**given[1], TIME: 0.5}, given[2]]
    assert TIME not in given[1]


def test_later_attempt_continues_from_its_checkpoint(file):
    # The checkpoint was at step 2: step 3 of the attempt before is done again.
    metrics.append_rows(file, [row(1), row(2), row(3, 9.0), evaluation(3), row(3, 0.7, attempt=1)])
    assert times(Totals(file, 1).add([row(3, 0.7, attempt=1)])) == pytest.approx([1.7])


def test_steps_of_two_attempts_count_once(file):
    metrics.append_rows(file, [row(1), row(2, 9.0), row(2, 0.25, attempt=1)])
    assert times(Totals(file, 2).add([row(3, attempt=2)])) == [1.25]


def test_evaluation_includes_the_previous_step(file):
    metrics.append_rows(file, [row(1), row(2)])
    rows = Totals(file, 1).add([evaluation(2, attempt=1), row(3, attempt=1)])
    assert times(rows) == [1.5]


@pytest.mark.parametrize("broken", ["nan", float("nan"), float("inf")])
def test_step_without_time_adds_no_time(broken, file):
    assert times(Totals(file, 0).add([row(1), row(2, broken), row(3)])) == [0.5, 0.5, 1.0]


def test_training_time_restarts_without_earlier_rows(file):
    assert times(Totals(file, 1).add([row(7, attempt=1)])) == [0.5]


def test_tokens_are_counted_and_constants_are_not_drawn(file):
    given = [{**row(n), "train/tokens": 64, "train/samples": 8, "train/warmup": 1} for n in (1, 2)]
    found = Totals(file, 0).add(given)
    assert [each[TOTAL_TOKENS] for each in found] == [64, 128]
    assert set(drawn(found[0])) == {"train/global_step", "train/step_time_s", TIME, TOTAL_TOKENS}
