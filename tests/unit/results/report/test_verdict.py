"""The sentences above a report: what pays most, at what cost, and how sure that is."""

import json
from dataclasses import replace

import pytest
from unit.results.report.made import MIB, Run, compared, make_run, make_sweep, repeated

from eke.common.paths import SweepPaths
from eke.results.report.compare import compare_runs
from eke.results.report.compare.sentences import verdict_lines


def said(tmp_path, *variants, **options):
    return verdict_lines(compared(tmp_path, [run for v in variants for run in v], **options))


def test_what_pays_is_said_with_its_interval_its_memory_and_its_loss(tmp_path):
    first, second = said(
        tmp_path, repeated({"precision": "fp32"}),
        repeated({"precision": "bf16"}, 230.0, peak=50 * MIB),
    )  # fmt: skip
    assert first == (
        "precision=bf16 is fastest: 2.30x the samples/s of precision=fp32 at 0.50x its peak "
        "memory; eval loss equal."
    )
    assert second.startswith(
        "precision=bf16 takes the least memory: 0.50x the peak of the baseline"
    )


def test_repeats_are_made_by_a_command_that_takes_them(tmp_path):
    """`eke fit` refuses sweep.repeats, and runs typed alone have no command of a sweep."""
    for number, precision in enumerate(("fp32", "bf16")):
        make_run(tmp_path / "runs" / f"{number:016x}", Run({"precision": precision}))
    first = verdict_lines(compare_runs([tmp_path / "runs"]))[0]
    assert first.startswith("Too few repeats to separate differences from chance")
    assert "python train.py -m with sweep.repeats=3" in first
    sweep = make_sweep(tmp_path, [Run({"precision": p}) for p in ("fp32", "bf16")])
    assert "sweep.repeats=3 and the same command" in verdict_lines(compare_runs([sweep]))[0]
    paths = SweepPaths(sweep)
    content = {**json.loads(paths.sweep.read_text()), "command": ["fit", "model=tiny"]}
    paths.sweep.write_text(json.dumps(content))
    assert "python train.py -m with sweep.repeats=3" in verdict_lines(compare_runs([sweep]))[0]


@pytest.mark.parametrize(
    ("choices", "keys", "rounds"),
    [({"model": "tiny_gpt2"}, {}, 1), ({}, {"data.seq_len": 16}, 3)],
    ids=["model, once", "length, thrice"],
)
def test_what_learns_something_else_is_no_headline(choices, keys, rounds, tmp_path):
    """Runs of a folder need not have to do with each other: a smaller model is no technique."""
    other = repeated(choices, 900.0, rounds, peak=MIB, keys=keys)
    base = repeated({"precision": "fp32"}, rounds=rounds)
    faster = repeated({"precision": "bf16"}, 230.0, rounds)
    *told, last = said(tmp_path, base, other, faster)
    assert told
    assert not [line for line in told if other[0].typed[0] in line]
    assert "precision=bf16" in told[0]
    assert last.startswith("Not compared with ")
    assert other[0].typed[0] in last
    assert "(another model, task or data); eke report SWEEP" in last


def test_where_all_learn_something_else_that_is_all_there_is_to_say(tmp_path):
    (told,) = said(tmp_path, [Run({"model": "tiny"})], [Run({"model": "tiny_gpt2"}, speed=900.0)])
    assert told.startswith("Not compared with model=tiny: model=tiny_gpt2 (another model")


def test_other_numbers_of_steps_are_told_beside_a_speed_of_few_repeats(tmp_path):
    longer = [Run(keys={"train.steps": 200}, steps=200, speed=120.0)]
    first = said(tmp_path, [Run(keys={"train.steps": 100})], longer)[0]
    assert "the speed of train.steps=100, losses not comparable (1600 samples seen" in first


def test_noise_is_not_resolved(tmp_path):
    noisy = [Run({"precision": "bf16"}, repeat=n, speed=s) for n, s in enumerate((90, 120, 105))]
    first = said(tmp_path, repeated({"precision": "fp32"}), noisy)[0]
    assert first.startswith("Nothing is significantly faster than precision=fp32")
    assert "not resolved: 1.04x (0.74 to 1.48)" in first


def test_the_highest_speed_may_be_below_the_baselines(tmp_path):
    """The largest difference is not the one of the fastest row: nothing says so."""
    first = said(tmp_path, repeated({"precision": "fp32"}), repeated({"precision": "fp16"}, 46.0),
                 repeated({"precision": "bf16"}, 100.1))[0]  # fmt: skip
    assert "largest" not in first
    assert "the fastest other is precision=bf16" in first


def undecided(choices, speed, spread=(0.8, 1.0, 1.25), **other):
    return [Run(choices, repeat=n, speed=speed * spread[n], **other) for n in range(3)]


def test_a_higher_row_that_is_undecided_is_named_before_the_winner_is_believed(tmp_path):
    first = said(tmp_path, repeated({"precision": "fp32"}),
                 undecided({"precision": "bf16"}, 208.0, (0.99, 1.01, 1.0)),
                 undecided({"optimizer": "lion"}, 218.0, (0.6, 1.0, 1.6)),
                 undecided({"optimizer": "sgd"}, 90.0, (1.01, 1.0, 0.99)),
                 undecided({"optimizer": "adafactor"}, 205.0, (1.6, 0.6, 1.0)))[0]  # fmt: skip
    assert "precision=bf16" in first.partition(" is the fastest that is shown")[0]
    _, _, rest = first.partition("Higher, but not significantly faster than ")
    above, _, peers = rest.partition("Not distinguishable from it: ")
    assert "optimizer=lion" in above
    assert "with 2.15x (" in above
    assert "adafactor" not in above
    assert "optimizer=lion" in peers
    assert "optimizer=adafactor" in peers
    assert "sgd" not in first


@pytest.mark.parametrize("kind", [repeated, undecided])
def test_a_faster_row_at_a_worse_loss_limits_what_is_fastest(tmp_path, kind):
    """It is no peer, and the winner is not called the fastest of all; so with least memory."""
    rows = (repeated({"precision": "fp32"}), repeated({"precision": "bf16"}, 200.0, peak=90 * MIB),
            kind({"optimizer": "lion"}, 400.0, loss=2.5, peak=50 * MIB))  # fmt: skip
    first, second = said(tmp_path, *[[replace(r, seed=r.repeat) for r in row] for row in rows])
    for line in (first, second):
        assert " among those without a significantly higher loss: " in line
        assert "lion" not in line


def test_rows_of_one_least_memory_are_all_named(tmp_path):
    small = [repeated({"precision": p}, 80.0, peak=50 * MIB) for p in ("fp16", "bf16")]
    second = said(tmp_path, repeated({"precision": "fp32"}), *small)[1]
    assert second.endswith("Not distinguishable from it: precision=bf16.")


def test_speed_at_a_worse_loss_does_not_pay(tmp_path):
    base, worse = repeated({"precision": "fp32"}), repeated({"precision": "bf16"}, 230.0, loss=2.5)
    seeds = [[replace(run, seed=run.repeat) for run in runs] for runs in (base, worse)]
    first = said(tmp_path, *seeds)[0]
    assert first.startswith(
        "Nothing is significantly faster than precision=fp32 without a higher loss"
    )
    assert "eval loss higher (+25 %)" in first


@pytest.mark.parametrize(
    ("runs", "text"),
    [
        ([Run(outcome="refused", reason="no")], "No run has succeeded yet"),
        ([Run(outcome="oom", speed=None, peak=None, loss=None)], "No run succeeded"),
        ([Run()], "Only one configuration succeeded"),
        (
            [Run({"precision": p}, speed=None) for p in ("fp32", "bf16")],
            "No comparable speed was measured",
        ),
    ],
)
def test_with_little_there_is_little_to_say(tmp_path, runs, text):
    assert verdict_lines(compared(tmp_path, runs))[0].startswith(text)


def test_copies_of_one_seed_never_reject_a_faster_row(tmp_path):
    """Dropout's chance, bit-equal in all repeats, was told as a worse loss."""
    base = repeated({"precision": "fp32"})
    first = said(tmp_path, base, repeated({"precision": "bf16"}, 157.0, loss=2.028))[0]
    assert first.startswith("precision=bf16 is fastest: 1.57x")
    assert "eval loss not compared: one seed (+1.4 %)" in first
