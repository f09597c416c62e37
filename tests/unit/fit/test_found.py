"""What a search says it has found, from trials whose times are made up."""

import math
from types import SimpleNamespace

import pytest

from eke.fit import Measured, Numerics, Objective, Trial, all_diverge, fit_of
from eke.fit.found import deviation_between
from eke.fit.show import describe_fit, notes

SPREAD = 0.002


def found(*times: tuple[int, float]):
    """A finished search of two configurations, of which the first is as typed."""
    trials = [Measured(number, 0, Trial(step_s, SPREAD), "ok") for number, step_s in times]
    candidates = SimpleNamespace(found=[SimpleNamespace(), SimpleNamespace()], first=0)
    order = sorted({n for n, _ in times}, key=lambda n: min(t for m, t in times if m == n))
    search = SimpleNamespace(objective=Objective.speed, ranking=lambda: order)
    return fit_of(search, candidates, trials, Numerics.same)


def test_a_steady_machine_resolves_a_tenth() -> None:
    fit = found((0, 1.1), (1, 1.0), (1, 1.001))
    assert fit.gain.factor == pytest.approx(1.1, rel=1e-2)
    assert fit.gain.is_resolved
    assert not notes(fit, SimpleNamespace(steps=SimpleNamespace(total=100)))


def test_what_repeats_differ_by_is_doubt_about_all_of_them() -> None:
    """Steps within each trial are alike; another trial of the same took 1.5 times as long."""
    fit = found((0, 1.3), (1, 1.0), (1, 1.5))
    assert fit.between == pytest.approx(math.log(1.5) / math.sqrt(2))
    assert not fit.gain.is_resolved
    assert fit.typed.error == pytest.approx(fit.between), "tried once: no less doubt"
    assert fit.best.error == pytest.approx(fit.between / math.sqrt(2))
    (note,) = notes(fit, SimpleNamespace(steps=SimpleNamespace(total=100)))
    assert "differ by 29%" in note


def test_deviation_is_pooled_over_what_was_repeated() -> None:
    assert deviation_between([]) == 0
    assert deviation_between([[1.0], [2.0]]) == 0
    assert deviation_between([[0.0, 2.0], [5.0]]) == pytest.approx(math.sqrt(2))
    assert deviation_between([[0.0, 2.0], [1.0, 1.0, 1.0]]) == pytest.approx(math.sqrt(2 / 3))


@pytest.mark.parametrize(
    ("outcome", "number", "numerics", "expected"),
    [
        ("diverged", 0, Numerics.same, True),
        ("diverged", 0, Numerics.mixed, False),
        ("diverged", 1, Numerics.same, False),
        ("crashed", 0, Numerics.same, False),
    ],
)
def test_what_was_typed_diverges_and_so_does_whatever_computes_the_same(
    outcome, number, numerics, expected
) -> None:
    trials = [Measured(number, 0, Trial(None), outcome)]
    assert all_diverge(trials, 0, numerics) is expected
    candidates = SimpleNamespace(found=[SimpleNamespace()] * 2, first=0)
    search = SimpleNamespace(objective=Objective.speed, ranking=list)
    told = describe_fit(fit_of(search, candidates, trials, numerics), SimpleNamespace())
    assert ("lower optimizer.lr" in told) is expected
