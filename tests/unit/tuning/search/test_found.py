"""What a search says it has found, from trials whose times are made up."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from eke.rules.techniques import Numerics
from eke.tuning.search.render_result import describe_fit, notes
from eke.tuning.search.result import Fit, all_diverge
from eke.tuning.search.search import Measured
from eke.tuning.search.search_space import Objective, Trial, deviation, deviation_between

SPREAD = 0.002


WORK = SimpleNamespace(
    steps=SimpleNamespace(total=100), batch=SimpleNamespace(per_device=4, samples_per_step=4)
)
"""Of what was typed, as much as the words about a search need."""


def candidate(name: str) -> SimpleNamespace:
    values = [SimpleNamespace(overrides=[name])] if name else []
    return SimpleNamespace(values=values, plan=WORK, point=SimpleNamespace(devices=1))


def found(
    *times: tuple[int, float], spread: float = SPREAD, objective=Objective.speed, further=0.0
):
    """A finished search of up to six configurations, of which the first is as typed."""
    trials = [
        Measured(number, 0, Trial(step_s, spread, peak_bytes=2**20), "ok")
        for number, step_s in times
    ]
    every = [candidate(name) for name in ("", "a=1", "b=1", "c=1", "d=1", "e=1")]
    candidates = SimpleNamespace(found=every, first=0)
    order = sorted({n for n, _ in times}, key=lambda n: min(t for m, t in times if m == n))
    search = SimpleNamespace(
        objective=objective, ranking=lambda: order, further_gain=lambda: further
    )
    return Fit(search, candidates, trials, Numerics.same)


def test_equivalent_rivals_of_the_best_are_named() -> None:
    """What was typed is in the verdict, where it is not the best."""
    typed_is_best = found((0, 1.0), (1, 1.001), (2, 1.2))
    assert [each.candidate for each in typed_is_best.rivals] == [typed_is_best.candidates.found[1]]
    told = describe_fit(typed_is_best, WORK)
    assert "not significantly better than a=1\n" in told + "\n"
    assert not found((0, 1.0), (1, 1.1)).rivals
    assert not found((0, 1.001), (1, 1.0)).rivals, "not resolved: the verdict says so"
    alike = found((0, 1.3), *((n, 1.0 + n / 1e4) for n in (1, 2, 3, 4, 5)))
    assert "not significantly better than b=1, c=1, d=1 and 1 other" in describe_fit(alike, WORK)
    memory = found((0, 1.0), (1, 1.001), objective=Objective.memory)
    assert len(memory.rivals) == 1, "as much memory, and as fast"


def test_only_a_significant_gain_is_written_as_an_option() -> None:
    assert found((0, 1.1), (1, 1.0), (1, 1.001)).is_found
    assert not found((0, 1.001), (1, 1.0)).is_found, "not resolved"
    assert not found((0, 1.0), (1, 1.1)).is_found, "what was typed is the best"
    assert found((1, 1.0)).is_found, "what was typed could not be measured"
    assert not found().is_found


def test_single_trial_of_the_best_is_stated() -> None:
    (note,) = notes(found((0, 1.1), (1, 1.0)), WORK)
    assert "the best was tried once" in note
    assert not notes(found((0, 1.0), (1, 1.1)), WORK), "what was typed needs no option"


def test_cost_of_less_memory_is_stated() -> None:
    fit = found((0, 1.0), (1, 3.5), objective=Objective.memory)
    one = next(each for each in fit.standings if each.candidate is fit.candidates.found[1])
    less = replace(one, tried=(replace(one.tried[0], trial=Trial(3.5, SPREAD, peak_bytes=2**19)),))
    fit.standings = (less, fit.typed)
    told = describe_fit(fit, WORK)
    assert "2.00x less peak memory than the baseline, a step takes 3.50 times as long" in told


def peaks(fit, *, best: float, typed: float):
    """The search, its first two configurations with these peaks in MiB."""
    found_, before = fit.standings[0], fit.typed
    assert found_ is not before

    def with_peak(standing, mib):
        trial = replace(standing.tried[0].trial, peak_bytes=int(mib * 2**20))
        return replace(standing, tried=(replace(standing.tried[0], trial=trial),))

    found_, before = with_peak(found_, best), with_peak(before, typed)
    fit.standings, fit.typed = (found_, before), before
    return fit


@pytest.mark.parametrize(
    ("before", "best", "told"),
    [
        (2.0, 8, "2.00x (1.92 to 2.08) as fast as the baseline, the peak is the same"),
        (8.0, 8.2, "8.00x (7.67 to 8.34) as fast as the baseline, its peak is 2.5% higher"),
    ],
)
def test_faster_of_equal_memory_is_chosen(before, best, told) -> None:
    fit = peaks(found((0, before), (1, 1.0), objective=Objective.memory), best=best, typed=8)
    assert fit.is_found
    assert f"best: a=1: {told}" in describe_fit(fit, WORK)


def test_single_disturbed_trial_leaves_the_gain_significant() -> None:
    fit = found((0, 1.2), (0, 1.21), (1, 1.0), (1, 10.0), (1, 1.01))
    assert fit.best.step_s == pytest.approx(1.01)
    assert fit.gain.is_resolved
    assert fit.gain.factor == pytest.approx(1.205 / 1.01, rel=1e-3)


@pytest.mark.parametrize("count", [3, 4])
def test_deviation_of_few_values_is_unbiased(count) -> None:
    draws = np.random.default_rng(count).normal(5.0, 0.2, size=(4000, count))
    assert np.mean([deviation(each) for each in draws]) == pytest.approx(0.2, rel=0.05)


def test_gain_of_a_larger_budget_is_stated() -> None:
    (note,) = notes(found((0, 1.1), (1, 1.0), (1, 1.001), further=0.0213), WORK)
    assert note == (
        "one more trial was expected to gain 2.1%: to continue from these: --budget-trials 6"
    )


def test_stalling_steps_widen_the_error() -> None:
    told = describe_fit(found((0, 1.0), (1, 1.5), spread=9.4), WORK)
    assert "steps of one trial differ so much that its median may be 940% off" in told
    assert "paths.runs=ANOTHER_FOLDER" in told
    assert "so much" not in describe_fit(found((0, 1.0), (1, 1.5)), WORK)


def test_spread_between_repeats_widens_all_errors() -> None:
    """Steps within each trial are alike; another trial of the same took 1.5 times as long."""
    fit = found((0, 1.3), (1, 1.0), (1, 1.5))
    assert fit.between == pytest.approx(math.log(1.5) / math.sqrt(2))
    assert not fit.gain.is_resolved
    assert fit.typed.error == pytest.approx(fit.between), "tried once: no less doubt"
    assert fit.best.error == pytest.approx(fit.between / math.sqrt(2))
    (note,) = notes(fit, WORK)
    assert "differ by 29%" in note


def test_deviation_is_pooled_over_repeated_trials() -> None:
    assert deviation_between([]) == 0
    assert deviation_between([[1.0], [2.0]]) == 0
    assert deviation_between([[0.0, 2.0], [5.0]]) == pytest.approx(math.sqrt(2))
    assert deviation_between([[0.0, 2.0], [1.0, 1.0, 1.0]]) == pytest.approx(math.sqrt(2 / 3))
    assert deviation_between([[0.0, 0.1, 9.0]]) < 0.3, "one of them was disturbed"


@pytest.mark.parametrize(
    ("outcome", "number", "numerics", "expected"),
    [
        ("diverged", 0, Numerics.same, True),
        ("diverged", 0, Numerics.mixed, False),
        ("diverged", 1, Numerics.same, False),
        ("crashed", 0, Numerics.same, False),
    ],
)
def test_divergence_of_the_starting_point_is_explained(outcome, number, numerics, expected) -> None:
    trials = [Measured(number, 0, Trial(None), outcome)]
    assert all_diverge(trials, 0, numerics) is expected
    candidates = SimpleNamespace(found=[candidate("")] * 2, first=0)
    search = SimpleNamespace(objective=Objective.speed, ranking=list, further_gain=lambda: 0.0)
    told = describe_fit(Fit(search, candidates, trials, numerics), SimpleNamespace())
    assert ("numerically equivalent one" in told) is expected
    assert ("all trials diverged. Lower optimizer.lr" in told) is (
        outcome == "diverged" and not expected
    )
