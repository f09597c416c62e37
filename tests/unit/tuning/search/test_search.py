"""A search finds nearly the best with few trials, on machines it knows nothing about."""

import math
from dataclasses import replace
from statistics import median

import numpy as np
import pytest
from unit.tuning.search.surfaces import OFF, make, search
from unit.tuning.search.surfaces_of_parts import make_of_parts

from eke.estimate.memory import Verdict
from eke.tuning.search.search import Search
from eke.tuning.search.search_space import (
    Objective,
    Point,
    Surrogate,
    Trial,
    expected_improvement,
    prior_s,
)

SEEDS = range(40)


@pytest.mark.slow
def test_search_with_time_model_ends_within_five_percent():
    """Which is off by 12 % a technique and 40 % a machine, and shares nothing with the surfaces."""
    estimated = [search(make(seed, estimated=True), seed + 1) for seed in SEEDS]
    near = sum(found.off <= OFF for found in estimated)
    assert near >= 0.8 * len(estimated), sorted(found.off for found in estimated)
    assert median(found.off for found in estimated) <= 1.02
    assert max(found.num_trials for found in estimated) <= 8
    assert max(found.num_out_of_memory for found in estimated) <= 1


@pytest.mark.slow
def test_search_succeeds_if_techniques_act_on_step_phases():
    """Another generator: what a technique is worth depends on the others and on the micro-batch."""
    surfaces = [make_of_parts(seed, estimated=True) for seed in SEEDS]
    ends = [search(surface, seed + 1) for seed, surface in zip(SEEDS, surfaces, strict=True)]
    near = sum(found.off <= OFF for found in ends)
    assert near >= 0.9 * len(ends), sorted(found.off for found in ends)
    assert max(found.num_out_of_memory for found in ends) <= 1


@pytest.mark.slow
def test_search_without_time_model_finds_most_of_the_gain():
    surfaces = [make(seed, estimated=False) for seed in SEEDS]
    ends = [search(surface, seed + 1) for seed, surface in zip(SEEDS, surfaces, strict=True)]
    before = [s.step_s[s.typed] / s.best_s for s in surfaces if s.typed is not None]
    assert median(found.off for found in ends) <= 1.10
    assert median(found.off for found in ends) - 1 <= 0.25 * (median(before) - 1)


@pytest.mark.slow
def test_more_trials_improve_the_result():
    few = [search(make(seed, estimated=False), seed, budget=4).off for seed in SEEDS]
    many = [search(make(seed, estimated=False), seed, budget=16).off for seed in SEEDS]
    assert np.mean(np.log(many)) < 0.5 * np.mean(np.log(few))


def points(*seconds: float) -> list[Point]:
    """One axis, a value each."""
    return [Point((f"v{n}",), 1, peak_bytes=2**20, expected_s=s) for n, s in enumerate(seconds)]


def test_starting_point_is_tried_first_and_the_best_confirmed():
    looking = Search(points(1.0, 0.5, 2.0), Objective.speed, 4, first=2)
    assert looking.next() == [2]
    looking.tell(2, Trial(2.0))
    assert looking.next() == [1]
    looking.tell(1, Trial(0.5))
    while chosen := looking.next():
        looking.tell(chosen[0], Trial(1.0))
    assert looking.to_confirm()[0] == 1
    assert looking.left >= 1


def test_remaining_budget_confirms_rivals_and_starting_point():
    looking = Search(points(1.0, 0.50, 0.51, 3.0), Objective.speed, 8, first=0)
    for number, seconds in ((0, 1.0), (1, 0.50), (2, 0.51)):
        looking.tell(number, Trial(seconds))
    assert looking.to_confirm() == [1, 2, 0]
    looking.budget = 5
    assert looking.to_confirm() == [1, 2]
    looking.tell(2, Trial(0.55))
    assert looking.to_confirm() == [1]
    looking.budget = 8
    assert looking.to_confirm() == [1, 0], "2 was tried twice"
    looking.tell(1, Trial(0.57))
    assert looking.to_confirm() == [0], "2 is the best now, and confirmed"
    looking.tell(0, Trial(1.0))
    assert looking.to_confirm() == []
    best_is_typed = Search(points(1.0, 2.0), Objective.speed, 8, first=0)
    best_is_typed.tell(0, Trial(1.0))
    assert best_is_typed.to_confirm() == [0]


def test_expected_further_gain_is_estimated():
    looking = Search(points(1.0, 0.5, 0.49, 50.0), Objective.speed, 3, first=0)
    looking.tell(0, Trial(1.0))
    looking.tell(1, Trial(0.5))
    looking.tell(1, Trial(0.5))
    assert looking.next() == []
    assert 0.003 < looking.further_gain() < 0.1, "the third may be better"
    looking.tell(2, Trial(0.49))
    assert looking.further_gain() == 0.0, "the fourth is not"


def test_oom_excludes_larger_and_risky_points():
    large = Point(("a",), 8, verdict=Verdict.tight, peak_bytes=100, expected_s=0.5)
    larger = Point(("b",), 8, verdict=Verdict.fits, peak_bytes=120, expected_s=0.5)
    risky = Point(("c",), 4, verdict=Verdict.tight, peak_bytes=50, expected_s=0.5)
    small = Point(("d",), 2, verdict=Verdict.fits, peak_bytes=40, expected_s=0.9)
    looking = Search([large, larger, risky, small], Objective.speed, 8, first=None)
    looking.tell(0, Trial(None, ran_out=True))
    assert looking.next(4) == [3]


def test_failed_point_is_not_repeated_and_the_search_continues():
    looking = Search(points(1.0, 0.5, 0.6), Objective.speed, 8, first=0)
    looking.tell(0, Trial(1.0))
    looking.tell(1, Trial(None))
    assert looking.next() == [2]
    looking.tell(2, Trial(0.6))
    assert looking.ranking() == [2, 0]


def with_kernels(*names: str) -> list[Point]:
    """Each of them compiled and not; the further, the faster."""
    return [
        Point((kernels, compiler), 8, expected_s=0.9**n * (0.8 if compiler == "inductor" else 1))
        for n, kernels in enumerate(names)
        for compiler in ("eager", "inductor")
    ]


def test_failing_technique_is_not_combined():
    """A package that does not know the model costs one trial, and not all of them."""
    looking = Search(with_kernels("plain", "liger"), Objective.speed, 8, first=0)
    looking.tell(0, Trial(1.0))
    assert looking.next() == [3]
    looking.tell(3, Trial(None))
    assert looking.next() == [1], "the compiler may be innocent"
    looking.tell(1, Trial(0.8))
    assert looking.next() == [], "so it was the kernels"


def test_proven_technique_is_not_blamed_for_a_failure():
    other_cut = Point(("liger", "inductor"), 4, expected_s=0.5)
    every = [*with_kernels("plain", "liger"), other_cut]
    looking = Search(every, Objective.speed, 8, first=0)
    for number, trial in ((0, Trial(1.0)), (2, Trial(0.9)), (1, Trial(0.8)), (3, Trial(None))):
        looking.tell(number, trial)
    assert looking.next() == [4]


def test_search_without_measurements_confirms_no_point():
    looking = Search(points(1.0, 0.5), Objective.speed, 8, first=0)
    for number in (0, 1):
        looking.tell(number, Trial(None))
    assert (looking.next(), looking.ranking(), looking.to_confirm()) == ([], [], [])


def beside_its_rival(verdict: Verdict = Verdict.fits) -> list[Point]:
    """`kept` and `recomputed` do the same; the estimates are for the slower by mistake."""
    first = Point(("typed",), 4, peak_bytes=50, expected_s=1.0)
    kept = Point(("kept",), 4, verdict=verdict, peak_bytes=100, expected_s=0.9)
    saves = (("kept",), ("no such",))
    recomputed = replace(kept, values=("recomputed",), verdict=Verdict.fits, peak_bytes=60,
                         expected_s=0.5, needless_beside=saves)  # fmt: skip
    return [first, kept, recomputed, replace(recomputed, micro_batch=8, peak_bytes=110)]


def test_memory_saving_is_not_tried_with_enough_memory():
    """Only with the micro-batch that has none otherwise, whatever estimates say."""
    looking = Search(beside_its_rival(), Objective.speed, 8, first=0)
    tried = []
    while chosen := looking.next():
        tried += chosen
        looking.tell(chosen[0], Trial(1.0))
    assert 2 not in tried
    assert 3 in tried
    assert 2 not in looking.by_expectation()


@pytest.mark.parametrize("outcome", [Trial(None), Trial(None, ran_out=True)])
def test_point_is_tried_after_a_cheaper_one_fails(outcome):
    looking = Search(beside_its_rival(), Objective.speed, 8, first=0)
    looking.tell(0, Trial(1.0))
    looking.tell(1, outcome)
    assert 2 in looking.next(4)


def test_memory_saving_is_tried_if_memory_is_scarce_or_the_goal():
    tight = Search(beside_its_rival(Verdict.tight), Objective.speed, 8, first=0)
    frugal = Search(beside_its_rival(), Objective.memory, 8, first=0)
    for looking in (tight, frugal):
        looking.tell(0, Trial(1.0, peak_bytes=50))
        assert 2 in looking.by_expectation()
    assert 2 in tight.next(3)


def compiling(seconds: float, steps: int, estimated: bool = True) -> list[Point]:
    """What compiling is worth depends on how often what it makes is used."""
    eager = Point(("none",), 8, expected_s=1.0)
    compiled = Point(("inductor",), 8, expected_s=0.5, usual=0.5, compiling_s=seconds / steps)
    every = [eager, compiled, replace(compiled, micro_batch=4, expected_s=0.6)]
    return every if estimated else [replace(each, expected_s=None) for each in every]


@pytest.mark.parametrize("estimated", [True, False])
def test_compiling_is_tried_for_long_runs(estimated):
    """30 s of it halve a second: not in five steps, but in ten thousand."""
    for steps, pays in ((5, False), (10_000, True)):
        looking = Search(compiling(30, steps, estimated), Objective.speed, 8, first=0)
        looking.tell(0, Trial(1.0))
        assert bool(looking.next()) == pays


def test_measured_compile_time_replaces_the_estimate():
    """Its estimate was fifty times too low: the other micro-batch is not tried either."""
    looking = Search(compiling(3, 100), Objective.speed, 8, first=0)
    looking.tell(0, Trial(1.0))
    assert looking.next() == [1]
    looking.tell(1, Trial(0.5 + 1.5, compiling_s=1.5))
    assert looking.next() == []
    assert looking.ranking() == [0, 1]
    assert looking.expected_s()[2] == pytest.approx(0.6 + 1.5, rel=0.1)


def test_search_without_estimates_starts_with_the_default():
    """Nothing is known in seconds yet, so that none can be added."""
    looking = Search(compiling(30, 10, estimated=False), Objective.speed, 8, first=None)
    assert looking.next() == [1]


def test_missing_estimate_is_taken_from_the_nearest_point():
    known = Point(("none", "sdpa"), 8, expected_s=2.0)
    smaller = Point(("none", "sdpa"), 4, expected_s=3.0)
    eager = Point(("none", "eager"), 8, expected_s=4.0, usual=1.1)
    unknown = Point(("inductor", "eager"), 8, usual=0.55)
    alone = Point(("inductor", "sdpa"), 5, usual=0.5)
    every = [known, smaller, eager, unknown, alone]
    assert prior_s(every) == pytest.approx([2.0, 3.0, 4.0, 2.0, 1.5])
    assert prior_s([unknown, alone]) == [0.55, 0.5]


def test_parallel_trials_are_different_and_within_the_budget():
    looking = Search(points(1.0, 0.9, 0.8, 0.7, 0.6), Objective.speed, 4, first=0)
    chosen = looking.next(5)
    assert chosen[0] == 0
    assert len(set(chosen)) == len(chosen) <= 3  # one is kept for confirming


def test_memory_objective_prefers_less_memory_then_speed():
    small_slow = Point(("a",), 1, peak_bytes=50, expected_s=2.0)
    small_fast = Point(("b",), 1, peak_bytes=50, expected_s=1.0)
    large = Point(("c",), 1, peak_bytes=100, expected_s=0.5)
    looking = Search([small_slow, small_fast, large], Objective.memory, 8, first=2)
    for number, seconds in enumerate((2.0, 1.0, 0.5)):
        looking.tell(number, Trial(seconds, peak_bytes=looking.points[number].peak_bytes))
    assert looking.ranking() == [1, 0, 2]


def test_cost_objective_counts_devices():
    one = Point(("a",), 1, devices=1, expected_s=1.0)
    four = Point(("b",), 1, devices=4, expected_s=0.3)
    for objective, first in ((Objective.speed, 1), (Objective.cost, 0)):
        looking = Search([one, four], objective, 8, first=0)
        looking.tell(0, Trial(1.0))
        looking.tell(1, Trial(0.3))
        assert looking.ranking()[0] == first


def test_disturbed_trial_does_not_decide():
    """Its configuration took ten times as long once: a third trial tells which of them it was."""
    looking = Search(points(1.0, 0.5, 3.0), Objective.speed, 8, first=0)
    for number, seconds in ((0, 1.0), (1, 0.5), (1, 5.0)):
        looking.tell(number, Trial(seconds))
    assert looking.ranking() == [0, 1], "so far"
    assert looking.to_confirm() == [0, 1]
    looking.tell(0, Trial(1.01))
    assert looking.to_confirm() == [1]
    looking.tell(1, Trial(0.51))
    assert looking.ranking() == [1, 0]
    assert looking.to_confirm() == []
    assert looking.expected_s()[1] == pytest.approx(0.51, rel=0.02)


def test_noisy_machine_does_not_use_the_full_budget():
    looking = Search(points(1.0, 9.0), Objective.speed, 100, first=0)
    for seconds in (1.0, 2.0, 4.0, 8.0):
        assert looking.to_confirm() == ([0] if looking.trials else [])
        looking.tell(0, Trial(seconds))
    assert looking.to_confirm() == []


def test_clearly_slower_point_with_noise_is_not_repeated():
    looking = Search(points(1.0, 3.0), Objective.speed, 8, first=0)
    for number, seconds in ((0, 1.0), (0, 1.0), (1, 3.0), (1, 9.0)):
        looking.tell(number, Trial(seconds))
    assert looking.to_confirm() == []


def test_trial_updates_all_points_with_its_technique():
    every = [Point((a, b), 1, expected_s=1.0) for a in "xy" for b in "pq"]
    mean, deviation = Surrogate(every).posterior([0, 2], [0.0, math.log(0.5)], [0.01, 0.01])
    assert mean[3] < mean[1] - 0.2, "y halved the step with p, and is expected to with q"
    assert deviation[0] < deviation[1]


def test_expected_improvement_matches_integration():
    mean, deviation, best = np.array([0.2, -0.1]), np.array([0.5, 0.05]), 0.1
    grid = np.linspace(-6, 6, 200_001)
    for each, sd, found in zip(
        mean, deviation, expected_improvement(mean, deviation, best), strict=True
    ):
        density = np.exp(-0.5 * ((grid - each) / sd) ** 2) / (sd * math.sqrt(2 * math.pi))
        truth = np.sum(np.maximum(best - grid, 0) * density) * (grid[1] - grid[0])
        assert found == pytest.approx(truth, rel=1e-4)
