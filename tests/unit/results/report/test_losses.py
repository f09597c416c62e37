"""Comparison of losses and metrics: trainings, Holm's level, words, seeds, and units."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from unit.results.report.made import Run, compared, make_record, make_run

from eke.common.errors import ConfigError
from eke.common.paths import RunPaths
from eke.plan.record import Best, write_record
from eke.results.report.compare import compare_runs
from eke.results.report.compare.losses import LossComparison, Parity, compare_samples
from eke.results.report.compare.measures import keys_by

EVAL, ACCURACY = "loss.eval_final", "metrics.accuracy"


def judged(samples, trainings=None, key=EVAL, level=0.05, **options):
    """Row -> comparison with the first one; samples are lists by seed, or seed -> value."""
    rows = {
        row: values if isinstance(values, dict) else dict(enumerate(values))
        for row, values in samples.items()
    }
    return compare_samples(key, rows, trainings or {row: row for row in rows}, level, **options)


def of_changes(*changes):
    """The comparison of one row whose logarithms differ from the baseline's by this, by seed."""
    base = [2.0, 2.1, 1.9, 2.05][: len(changes)]
    other = [value * math.exp(change) for value, change in zip(base, changes, strict=True)]
    return judged({"base": base, "other": other})["other"]


@pytest.mark.parametrize(
    ("changes", "parity", "word"),
    [
        pytest.param((0.0, 1e-6, -1e-6), Parity.equal, "equal", id="equal"),
        pytest.param((0.001, 0.002, 0.003), Parity.within, "within 1 %", id="within, not higher"),
        pytest.param((-0.04, -0.041, -0.042), Parity.better, "lower", id="lower"),
        pytest.param((0.0051, 0.008, 0.0115), Parity.worse, "higher", id="higher by less than 1 %"),
        pytest.param((-0.01, -0.03, 0.0), Parity.undecided, "not decided", id="not decided"),
        pytest.param((-0.01, 0.0, -0.005), Parity.no_worse, "at most 1 % higher", id="no worse"),
        pytest.param((-0.0121, -0.0263, -0.0408), Parity.no_worse, "at most 1 % higher", id="R1"),
        pytest.param((0.1, 0.1), Parity.few, "not compared: 2 seeds", id="two seeds"),
        pytest.param((0.1,), Parity.few, "not compared: one seed", id="one seed"),
    ],
)
def test_verdict_words_follow_the_interval(changes, parity, word):
    found = of_changes(*changes)
    assert (found.parity, found.word) == (parity, word)
    if found.low is not None:
        ends = stats.ttest_1samp(changes, 0.0).confidence_interval()
        shown = [100 * math.expm1(end) for end in ends]
        assert (found.low, found.high) == pytest.approx(tuple(shown), rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "excludes"),
    [((0.0051, 0.008, 0.0115), False), ((0.04, 0.041, 0.042), True), ((0.1, -0.05, 0.1), False)],
    ids=["higher by less than the margin", "higher", "not decided"],
)
def test_only_significantly_higher_rows_are_excluded(changes, excludes):
    assert of_changes(*changes).excludes == excludes


def test_an_end_near_zero_is_not_shown_as_zero():
    assert LossComparison(low=-16.2, high=-0.3).interval == "-16.2 to -0.3 %"
    assert LossComparison(low=-16.2, high=-1.3).interval == "-16 to -1 %"


def noisy(rows, noise=0.005, seeds=3, seed=5):
    random = np.random.default_rng(seed)
    logs = noise * random.normal(size=(rows, seeds)) + 0.03 * random.normal(size=seeds)
    return {row: np.exp(values) for row, values in enumerate(logs)}


def test_noise_is_pooled_over_all_rows():
    """Three seeds of a row alone: t at 5 % / 11 asks for 10 % at this noise."""
    samples = noisy(12)
    samples[3] = samples[3] * 1.04
    found = judged(samples)
    assert [row for row, each in found.items() if each.parity is Parity.worse] == [3]
    assert found[3].low < 4.0 < found[3].high
    assert found[3].level == pytest.approx(0.05 / 11)
    assert found[5].level == pytest.approx(0.05 / 10)
    less = judged(samples, level=0.015)
    assert less[3].level == pytest.approx(0.015 / 11)
    assert less[3].low < found[3].low


def test_rows_of_one_training_are_one_comparison():
    samples = noisy(12)
    rounded = {row: values * (1 + 1e-4 * row) for row, values in samples.items()}
    twice = {f"{row}{end}": v for row, values in samples.items()
             for end, v in (("", values), ("b", rounded[row]))}  # fmt: skip
    trainings = {row: row.rstrip("b") for row in twice}
    found, once = judged(twice, trainings), judged(samples)
    for row in range(1, 12):
        assert found[str(row)] == found[f"{row}b"], "one training, one word"
        assert found[str(row)].low == pytest.approx(once[row].low, abs=0.15)
    assert found["0b"].parity is Parity.equal
    assert found["1"].first_level == pytest.approx(0.05 / 11)


def test_duplicate_rows_are_one_comparison():
    samples = noisy(6)
    copies = {**samples, **{row + 10: values for row, values in samples.items()}}
    found, once = judged(copies), judged(samples)
    assert found[10].parity is Parity.equal
    for row in range(1, 6):
        assert found[row] == found[row + 10] == once[row]


@pytest.mark.parametrize("of_base", [False, True], ids=["of another", "of the baseline's"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_outlying_row_is_a_separate_training(of_base, size):
    samples = noisy(12)
    trainings = {row: row // size for row in samples}
    for row in samples:  # rows of a training differ by their rounding
        shake = 1 + 2e-4 * np.random.default_rng(row).normal(size=3)
        samples[row] = samples[row - row % size] * shake
    odd = size - 1 if of_base else 2 * size - 1
    samples[odd] = samples[odd] * 1.06
    found = judged(samples, trainings)
    shown = {row for row, each in found.items() if each.parity in (Parity.worse, Parity.better)}
    assert shown == {odd}
    others = [row for row in found if trainings[row] == trainings[odd] and row != odd]
    assert all(found[row] != found[odd] for row in others)


def test_required_seeds_follow_the_normal_quantile():
    """12 rows: z = 2.84, so 5 % at 1.5 % of noise takes 5 seeds after rounding (report: 90 %)."""
    found = LossComparison(spread=1.5 * math.sqrt(2), first_level=0.05 / 11, seeds=3)
    by_hand = 2 * (2.84 + 1.28) ** 2 * (1.5 / 2) ** 2
    assert found.seeds_needed(2.0) == math.ceil(by_hand) == 20
    assert found.seeds_needed(10.0) == 3, "no interval has fewer"
    assert found.more_seeds == (20, 2.0)
    assert replace(found, seeds=20).more_seeds == (77, 1.0)
    assert replace(found, spread=30.0).more_seeds == (153, 10.0)
    assert LossComparison().more_seeds is LossComparison().seeds_needed(1.0) is None


@pytest.mark.parametrize("rows", [4, 12])
def test_seed_noise_is_pooled_over_rows(rows):
    found = [judged(noisy(rows, 0.02, seed=seed))[1].spread for seed in range(30)]
    assert np.median(found) == pytest.approx(2.0 * math.sqrt(2), rel=0.2)


# --- metrics --------------------------------------------------------------------------------------


def test_equal_accuracies_of_few_samples_are_not_significant():
    samples = {"base": [0.80] * 3, "other": [0.85] * 3}
    sure = judged(samples, key=ACCURACY)["other"]
    found = judged(samples, key=ACCURACY, evaluated=20)["other"]
    assert (sure.parity, sure.word) == (Parity.better, "higher")
    assert (found.word, found.unit) == ("at most 1 point lower", "points")
    floor = 2 * (100 / 20) ** 2 / 12
    half = stats.t.isf(0.025, 2) * math.sqrt(floor / 3)
    assert (found.low, found.high) == (pytest.approx(5 - half), pytest.approx(5 + half))


def test_pooled_noise_includes_rounding():
    """Macro F1 that never varies, a fifth of an example of 20 from each other."""
    samples = {row: [0.80 + 0.01 * (row % 2)] * 3 for row in range(6)}
    found = judged(samples, key="metrics.f1_macro", evaluated=20)
    assert {each.parity for each in found.values()} == {Parity.undecided, Parity.equal}


def test_metrics_equal_by_rounding_count_as_compared():
    """Leaving the family would ask less of the others, by chance."""
    random = np.random.default_rng(2)
    samples = {row: random.binomial(200, 0.8, size=3) / 200 for row in range(6)}
    samples |= {6: samples[0], 7: samples[0]}
    trainings = {row: row for row in samples} | {7: 0}
    found = judged(samples, trainings, key=ACCURACY, evaluated=200)
    assert found[6].parity is found[7].parity is Parity.equal
    assert found[1].first_level == pytest.approx(0.05 / 6), "7 is a copy by its settings"


@pytest.mark.parametrize(
    ("key", "other", "unit", "word"),
    [
        (ACCURACY, (0.8961, 0.906, 0.886), "points", "within 1 point"),
        (ACCURACY, (0.905, 0.93, 0.895), "points", "not decided"),
        (ACCURACY, (0.9, 0.93, 0.9), "points", "not decided"),
        (ACCURACY, (0.91, 0.93, 0.9), "points", "at most 1 point lower"),
        ("metrics.perplexity", (0.8, 0.81, 0.795), "%", "lower"),
        ("metrics.r2", (0.8, 0.81, 0.795), "", "lower"),
        (EVAL, (-0.1, 0.0, -0.2), "", "lower"),
        (EVAL, (0.903, 0.91, -0.01), "", "not decided"),
    ],
)
def test_units_and_words_of_measures(key, other, unit, word):
    found = judged({"base": (0.9, 0.91, 0.89), "other": other}, key=key)["other"]
    assert (found.unit, found.word) == (unit, word)
    by_t = stats.ttest_rel(other, (0.9, 0.91, 0.89)).confidence_interval()
    if unit != "%":
        factor = 100 if unit else 1
        assert (found.low, found.high) == pytest.approx([factor * end for end in by_t])


# --- records --------------------------------------------------------------------------------------


def seeds(values, choices, **options):
    return [Run(choices, repeat=n, seed=n, loss=value, **options)
            for n, value in enumerate(values)]  # fmt: skip


def test_nonpositive_losses_are_compared(tmp_path):
    runs = [*seeds((0.1, -0.1, 0.0), {}), *seeds((-0.4, -0.6, -0.5), {"optimizer": "sgd"})]
    rows = compared(tmp_path, runs).rows
    assert (rows[1].quality.word, rows[1].quality.unit) == ("lower", "")
    assert rows[1].estimates[EVAL].value == pytest.approx(-0.5)


@pytest.mark.parametrize("by", ["loss", "eval_loss", "train_loss"])
def test_rows_are_judged_and_sorted_by_a_loss(tmp_path, by):
    runs = [*seeds((2.0, 2.1, 1.9), {}), *seeds((1.6, 1.7, 1.5), {"optimizer": "sgd"}),
            *seeds((1.8, 1.9, 1.7), {"optimizer": "lion"})]  # fmt: skip
    found = compared(tmp_path, runs, by=by)
    order = [row.variant.settings["optimizer"] for row in found.rows]
    assert order == ["sgd", "lion", "adamw"]
    assert found.rows[0].quality.parity is Parity.better
    assert found.rows[0].quality.name == ("train loss" if by == "train_loss" else "eval loss")


def test_single_loss_can_be_selected():
    assert keys_by("eval_loss") == (EVAL,)
    assert keys_by("train_loss") == ("loss.train_final",)
    assert keys_by("") == keys_by("loss") == (EVAL, "loss.train_final")
    assert keys_by("accuracy") == (ACCURACY,)


def test_unknown_loss_is_rejected(tmp_path):
    with pytest.raises(ConfigError) as caught:
        compared(tmp_path, [Run({"precision": p}, loss=None) for p in ("fp32", "bf16")], by="loss")
    assert caught.value.problems[0].key == "--by"


def best_runs(folder, every, keep):
    """Three seeds of adamw, evaluated every 10 of 100 steps, and of lion: the best by `keep`."""
    number = 0
    for optimizer, steps, metric in (("adamw", 10, "loss"), ("lion", every, keep)):
        for run in seeds((2.0, 2.1, 1.9), {"optimizer": optimizer}):
            run = replace(run, keys={"train.eval_every": steps})
            make_run(folder / f"{number:016x}", run)
            record = make_record(f"{number:016x}", run)
            best = Best(metric, 10, 1.0) if metric else None
            write_record(RunPaths(folder / record.run_id), replace(record, best=best))
            number += 1


@pytest.mark.parametrize(
    ("every", "keep", "name"),
    [
        (10, "loss", "eval loss, best of 10"),
        (5, "loss", None),
        (10, "accuracy", None),
        (10, None, None),
        (100, "loss", None),
    ],
    ids=["same number", "more", "another metric", "last one", "only one"],
)
def test_best_of_equal_evaluation_counts_is_compared(tmp_path, every, keep, name):
    best_runs(tmp_path, every, keep)
    found = next(row.quality for row in compare_runs([tmp_path]).rows if not row.is_baseline)
    if name:
        assert (found.name, found.parity) == (name, Parity.equal)
    else:
        assert found.parity is Parity.other
        assert " 10 evaluations" in found.why
