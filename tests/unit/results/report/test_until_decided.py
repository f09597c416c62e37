"""sweep.repeats=auto: a look's decisions, and a report that keeps to its level and looks."""

import json

import numpy as np
import pytest
from unit.results.report.made import Run, make_sweep

from eke.common.paths import SweepPaths
from eke.results.report.compare import compare_runs
from eke.results.report.compare.comparison import find_families
from eke.results.report.compare.load_records import gather
from eke.results.report.compare.measures import SAMPLE_SPEED, STEP_TIME
from eke.results.report.compare.statistics import Significance, find_outliers
from eke.results.report.compare.until_decided import RowDecision, State, StoppingRule, decide


def samples(factors, repeats, noise, seed=0):
    """Speeds by row and repeat; row 0 is the baseline."""
    random = np.random.default_rng(seed)
    logs = np.log(factors) + noise * random.normal(size=(repeats, len(factors)))
    return {k: dict(enumerate(map(float, np.exp(logs[:, k])))) for k in range(len(factors))}


@pytest.mark.parametrize(
    ("most", "level"),
    [(3, 0.05), (5, 0.027), (7, 0.017), (10, 0.015), (11, 0.011), (30, 0.0075), (100, 0.0045)],
)
def test_level_is_stricter_with_more_possible_looks(most, level) -> None:
    assert StoppingRule(most).level == level


STATES = [
    pytest.param(1.3, 3, 0.02, State.higher, id="faster"),
    pytest.param(0.7, 3, 0.02, State.lower, id="slower"),
    pytest.param(1.0, 5, 0.005, State.same, id="the same"),
    pytest.param(1.02, 4, 0.15, State.futile, id="futile"),
    pytest.param(1.02, 3, 0.05, State.open, id="no forecast before four repeats"),
    pytest.param(1.3, 2, 0.02, State.open, id="too few repeats"),
]


@pytest.mark.parametrize(("factor", "repeats", "noise", "state"), STATES)
@pytest.mark.parametrize("others", [0, 6], ids=["two rows", "eight rows"])
def test_state_of_a_row(factor, repeats, noise, state, others) -> None:
    if others == 0 and state is State.same:
        noise /= 5  # two rows have no noise of others to go by
    if others == 0 and state in (State.higher, State.lower):
        noise /= 5
    found = decide(samples([1, factor] + [1.0] * others, repeats, noise), 0, StoppingRule(), {})
    assert found[1].state is state
    assert (found[1].low is None) is (repeats < 3)
    if found[1].low and found[1].high:
        excludes = not found[1].low <= 1 <= found[1].high
        assert excludes is (state in (State.higher, State.lower)), "word and interval agree"


def test_decided_row_is_final_and_not_counted() -> None:
    measured = samples([1, 1.3, 1.0, 1.0, 1.06], 4, 0.02)
    first = decide(measured, 0, StoppingRule(), {})
    known = {1: RowDecision(State.higher, 3, 1.3, 1.2, 1.4, 0.004)}
    again = decide(measured, 0, StoppingRule(), known)
    assert again[1] == known[1]
    assert again[4].level == pytest.approx(0.015 / 3)
    assert first[4].level == pytest.approx(0.015 / 3), "resolved ones leave it in one look as well"
    stopped = {2: RowDecision(State.same, 3)}
    assert decide(measured, 0, StoppingRule(), stopped)[2] == stopped[2]
    assert decide(measured, 0, StoppingRule(), stopped)[4].level == pytest.approx(0.015 / 3), (
        "still counts"
    )


def test_equivalent_row_is_not_tested_again() -> None:
    """It is resolved by now, and would leave the count of the others."""
    measured = samples([1, 0.97, 1.0, 1.0, 1.0], 6, 0.002)
    assert decide(measured, 0, StoppingRule(), {})[1].state is State.lower
    found = decide(measured, 0, StoppingRule(), {1: RowDecision(State.same, 6)})
    assert found[4].level == pytest.approx(0.015 / 4)


def test_losses_without_ratio_need_no_repeat() -> None:
    measured = {0: {0: 1.0, 1: 0.0, 2: 1.0}, 1: {0: -1.0, 1: 1.0, 2: 1.0}}
    assert decide(measured, 0, StoppingRule(), {})[1].state is State.futile


def test_rows_with_unequal_repeats_are_paired() -> None:
    measured = samples([1, 1.2, 1.0, 1.1, 0.9], 8, 0.01)
    measured[1] = {r: v for r, v in measured[1].items() if r in (0, 1, 6, 7)}
    found = decide(measured, 0, StoppingRule(), {})
    assert found[1].repeats == 4
    assert found[1].state is State.higher


SLOW = {"one in ten": (10, 3, 0.4), "one in four": (4, 0, 0.6), "two rows": (5, 2, 0.3)}


@pytest.mark.parametrize("case", SLOW)
def test_single_slow_run_is_excluded(case) -> None:
    repeats, at, factor = SLOW[case]
    measured = samples([1, 1.1, 1.0, 0.9][: 2 if case == "two rows" else 4], repeats, 0.01)
    assert not find_outliers(measured)
    measured[1][at] *= factor
    assert find_outliers(measured) == {1: at}


def test_small_or_shared_deviation_is_not_an_outlier() -> None:
    measured = samples([1, 1.1, 1.0, 0.9], 6, 0.01)
    slow = {
        k: {r: v * (0.4 if r == 2 else 1) for r, v in row.items()} for k, row in measured.items()
    }
    assert not find_outliers(slow), "a round in which all were slow"
    two = {**measured, 1: {r: v * (0.4 if r in (1, 2) else 1) for r, v in measured[1].items()}}
    assert not find_outliers(two), "the others do not agree"
    fast = {**measured, 1: {r: v * (2 if r == 1 else 1) for r, v in measured[1].items()}}
    assert not find_outliers(fast)
    few = {k: {r: v * (0.4 if (k, r) == (1, 2) else 1) for r, v in row.items() if r < 3}
           for k, row in measured.items()}  # fmt: skip
    assert not find_outliers(few), "three repeats"
    mild = {**measured, 1: {r: v * (0.88 if r == 1 else 1) for r, v in measured[1].items()}}
    assert not find_outliers(mild), "12 % slower"
    assert not find_outliers({})
    assert not find_outliers({0: {}, 1: {0: 1.0}})


def test_equal_noise_excludes_no_run() -> None:
    random = np.random.default_rng(3)
    found = [
        find_outliers(samples([1] * 8, 6, 0.05, int(random.integers(1e9)))) for _ in range(100)
    ]
    assert sum(map(bool, found)) == 0


OPTIMIZERS = ("adamw", "adafactor", "sgd", "lion")


def runs(factors, repeats, noise=0.01, seed=0, slow=()):
    """Runs of a sweep in rounds; `slow`: (row, repeat) at 0.4 times their speed."""
    measured = samples(factors, repeats, noise, seed)
    for k, r in slow:
        measured[k][r] *= 0.4
    return [
        Run({"optimizer": OPTIMIZERS[k]}, r, speed=100 * measured[k][r])
        for r in range(repeats)
        for k in range(len(factors))
    ]


def test_report_names_the_excluded_run(tmp_path) -> None:
    sweep = make_sweep(tmp_path, runs([1, 1.1, 1.0, 0.9], 6, slow={(1, 3)}))
    found = compare_runs([sweep])
    row = next(row for row in found.rows if "adafactor" in row.variant.label)
    assert row.ratios[SAMPLE_SPEED.key].n == 5
    assert row.ratios[SAMPLE_SPEED.key].decision is Significance.higher
    assert row.ratios[STEP_TIME.key].decision is Significance.lower
    assert row.estimates[SAMPLE_SPEED.key].value == pytest.approx(110, rel=0.02)
    assert len(row.variant.records) == 6
    (note,) = [note for note in found.notes if "excluded" in note]
    assert "adafactor" in note
    assert "repeat=3" in note
    assert "24 runs" in note


def with_looks(folder, sweep, rows=(), level=0.015):
    """As sweep.repeats=auto leaves it."""
    file = SweepPaths(sweep).sweep
    content = json.loads(file.read_text())
    content["repeats"] = {"rule": "auto", "max_repeats": 10, "resolve": 0.05, "level": level,
                          "rounds": 3, "rows": list(rows)}  # fmt: skip
    file.write_text(json.dumps(content))
    return sweep


def test_report_uses_the_level_of_the_sweep(tmp_path) -> None:
    """Read early at 5 %, it would claim more than the sweep."""
    made = make_sweep(tmp_path, runs([1, 1, 1, 1], 3))
    usual = compare_runs([made])
    strict = compare_runs([with_looks(tmp_path, made)])
    for name in OPTIMIZERS[1:]:
        before, after = (
            next(row for row in each.rows if name in row.variant.label).ratios[SAMPLE_SPEED.key]
            for each in (usual, strict)
        )
        assert after.level == pytest.approx(0.3 * before.level)
        assert after.low < before.low < before.high < after.high


def test_report_keeps_decisions_of_interim_looks(tmp_path) -> None:
    """All repeats may say less than the first three: the decision was the look's."""
    made = make_sweep(tmp_path, runs([1, 1.0, 1.0, 1.0], 4, noise=0.04))
    keys = {name: (f"optimizer={name}",) for name in OPTIMIZERS}
    row = RowDecision(State.higher, 3, 1.08, 1.02, 1.15, 0.005, None, "adafactor", keys["adamw"], 3)
    found = compare_runs([with_looks(tmp_path, made, [row.plain(keys["adafactor"])])])
    ratio = next(r for r in found.rows if "adafactor" in r.variant.label).ratios[SAMPLE_SPEED.key]
    assert (ratio.value, ratio.low, ratio.high) == (1.08, 1.02, 1.15)
    assert (ratio.decision, ratio.level) == (Significance.higher, 0.005)
    other = compare_runs([made], baseline="optimizer=sgd")
    ratio = next(r for r in other.rows if "adafactor" in r.variant.label).ratios[SAMPLE_SPEED.key]
    assert ratio.decision is Significance.unresolved, "it was decided against another baseline"


def test_families_of_a_sweep_match_the_report(tmp_path) -> None:
    made = [Run({"model": model}, r, keys={"optimizer.lr": lr}, seed=r)
            for r in range(3) for model in ("tiny", "gpt2") for lr in (0.1, 0.2)]  # fmt: skip
    families = find_families(gather([make_sweep(tmp_path, made)]).entries)
    assert [len(each.members) for each in families] == [2, 2]
    assert all(each.measures[0] == "loss.eval_final" for each in families)
    assert len({each.baseline for each in families}) == 2
    speeds = find_families(gather([make_sweep(tmp_path / "b", runs([1, 1.1], 3))]).entries)
    assert [tuple(each.measures) for each in speeds] == [(SAMPLE_SPEED.key,)]
