"""Timing, rates and losses against numbers worked out by hand."""

import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.plan.record.samples import eval_row, step_row

from eke.plan.record import Loss, Spread, Throughput, Timing, metrics

WARM = {metrics.WARMUP: 1}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], None),
        ([0.5], Spread(0.5, 0.5, 0.5, 1)),
        ([1.0, 2.0], Spread(1.5, 1.1, 1.9, 2)),
        ([7.0, 3, 0, 10, 1, 9, 2, 8, 4, 6, 5], Spread(5.0, 1.0, 9.0, 11)),
    ],
    ids=["nothing", "one", "two", "deciles"],
)
def test_spread_of_values(values, expected) -> None:
    found = metrics.spread(values)
    if expected is None:
        assert found is None
    else:
        assert vars(found) == pytest.approx(vars(expected))


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_spread_is_ordered_and_within_its_values(values) -> None:
    found = metrics.spread(values)
    slack = 1e-9 * max(values)
    assert min(values) - slack <= found.p10 <= found.median + slack
    assert found.median <= found.p90 + slack <= max(values) + 2 * slack
    assert found.median == statistics.median(values)


def test_steady_steps_exclude_warm_up() -> None:
    rows = [step_row(1, seconds=5.0, **WARM), step_row(2, seconds=1.0, **WARM)]
    rows += [step_row(3, seconds=0.2), step_row(4, seconds=0.4)]
    found = metrics.timing(rows)
    assert found.warmup_steps_s == [5.0, 1.0]
    assert found.steady_step_s.median == pytest.approx(0.3)
    assert found.steady_step_s.n == 2
    assert found.train_s == pytest.approx(6.6)
    assert list(found.phases) == ["data", "forward", "backward", "optimizer"]
    assert found.phases["backward"].median == pytest.approx(0.15)


def test_repeated_step_counts_once() -> None:
    rows = [step_row(1), step_row(2, seconds=9.0), step_row(2, attempt=1, seconds=0.3)]
    found = metrics.timing(rows)
    assert found.train_s == pytest.approx(0.4)
    assert found.steady_step_s.n == 2


def test_timing_without_steps_is_empty() -> None:
    assert metrics.timing([]) == Timing(clock="wall")
    assert metrics.timing([eval_row(0, 5.0)]) == Timing(clock="wall")


@pytest.mark.parametrize(
    ("gaps", "clock"),
    [((0.0, 0.1), "wall"), ((None, None), None), ((None, 0.1), "mixed")],
    ids=["of-now", "former", "continued-since"],
)
def test_clock_is_read_from_the_rows(gaps, clock) -> None:
    key = metrics.PHASE_KEYS["between"]
    rows = [step_row(n, **({} if gap is None else {key: gap})) for n, gap in enumerate(gaps, 1)]
    found = metrics.timing(rows)
    assert found.clock == clock
    assert ("between" in found.phases) == (clock is not None)


def test_warm_up_only_timing_has_no_steady_step() -> None:
    found = metrics.timing([step_row(1, **WARM)])
    assert found.steady_step_s is None
    assert found.phases == {}
    assert found.train_s == pytest.approx(0.1)


def test_throughput_is_samples_over_seconds_of_steady_steps() -> None:
    rows = [step_row(1, seconds=100.0, **WARM), step_row(2, seconds=0.5), step_row(3, seconds=1.5)]
    found = metrics.throughput(rows, 1e9, "formula", num_devices=2, peak_flops=1e11)
    assert found.samples_per_s == pytest.approx(16 / 2.0)
    assert found.tokens_per_s == pytest.approx(200 / 2.0)
    assert found.model_flops_per_s == pytest.approx(100 * 1e9 / 2)
    assert found.mfu_frac == pytest.approx(0.5)
    assert found.flops_formula == "formula"


def test_unknown_peak_gives_no_mfu() -> None:
    found = metrics.throughput([step_row(1)], 1e9, "formula", 1, None)
    assert found.mfu_frac is None
    assert found.model_flops_per_s == pytest.approx(1e12)


@pytest.mark.parametrize("rows", [[], [step_row(1, **WARM)]], ids=["no rows", "warm-up only"])
def test_missing_steady_step_gives_no_rate(rows) -> None:
    assert metrics.throughput(rows, 1e9, "f", 1, 1e12) == Throughput(flops_formula="f")


def test_losses_are_the_first_and_last() -> None:
    bits = {metrics.BITS_PER_BYTE: 8.0}, {metrics.BITS_PER_BYTE: 4.0}
    rows = [eval_row(0, 5.5, **bits[0]), step_row(1), step_row(2), eval_row(2, 2.75, **bits[1])]
    assert metrics.losses(rows) == Loss(4.0, 2.0, 5.5, 2.75, 8.0, 4.0)


def test_single_evaluation_has_no_final_loss() -> None:
    assert metrics.losses([eval_row(0, 5.5)]) == Loss(eval_start=5.5)


def test_non_finite_loss_is_missing() -> None:
    rows = [step_row(1), step_row(2, **{metrics.LOSS: math.nan}), eval_row(0, math.inf)]
    assert metrics.losses(rows) == Loss(train_first=4.0)


def test_newer_attempt_gives_the_final_loss() -> None:
    rows = [step_row(1), step_row(2), step_row(2, 1, **{metrics.LOSS: 1.25})]
    assert metrics.losses(rows).train_final == 1.25
