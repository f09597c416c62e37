"""The comparison: baseline, parity of losses, effects, ladder, front, equal time; the verdict."""

import json
import shlex
from dataclasses import replace

import numpy as np
import pytest
from unit.results.report.made import (
    MACHINE,
    MIB,
    Run,
    by_label,
    compared,
    make_run,
    make_sweep,
    repeated,
)

from eke.common.errors import ConfigError
from eke.common.paths import RunPaths
from eke.results.report.compare import compare_runs
from eke.results.report.compare.comparison import loss_words
from eke.results.report.compare.curves import read_curve
from eke.results.report.compare.losses import Parity
from eke.results.report.compare.sentences import verdict_lines
from eke.results.report.show.charts import phases

SPEED, PEAK = "throughput.samples_per_s", "memory.measured.peak_allocated_bytes"
TOKENS, RESERVED = "throughput.tokens_per_s", "memory.measured.peak_reserved_bytes"
PRODUCT = [
    ("fp32", "adamw", 100),
    ("bf16", "adamw", 200),
    ("fp32", "lion", 90),
    ("bf16", "lion", 270),
]


# --- baseline -------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", ["precision=bf16", "precision=bf16,optimizer=adamw", "half"])
def test_baseline_can_be_chosen(tmp_path, asked):
    runs = [Run({"precision": "fp32"}), Run({"precision": "bf16"})]
    found = compared(tmp_path, runs, ["whole", "half"], baseline=asked)
    assert found.machines[0].baseline.label == "half"
    named = compared(tmp_path / "named", runs, ["whole", "baseline"])
    assert named.machines[0].baseline.label == "baseline"


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ("precision=fp8", "no run has it; differing: precision, optimizer"),
        ("nobody", "no run has it"),
        ("precision=bf16", "2 configurations have it"),
        ("=", "no run has it"),
    ],
)
def test_unknown_or_ambiguous_baseline_is_rejected(tmp_path, asked, why):
    runs = [
        Run({"precision": p, "optimizer": o}) for p in ("fp32", "bf16") for o in ("adamw", "lion")
    ]
    with pytest.raises(ConfigError, match=why) as caught:
        compared(tmp_path, runs, baseline=asked)
    assert "--baseline precision=" in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [("precision=bf16", ["bf16", "bf16"]), ("precision=tf32", ["tf32", "fp32"])],
    ids=["in both", "in one"],
)
def test_each_group_has_its_own_baseline(tmp_path, asked, chosen):
    """A group that lacks the one that is asked for has its first; the largest group comes first."""
    runs = [Run({"model": m, "precision": p}) for m, p in
            (("gpt2", "fp32"), ("gpt2", "bf16"), ("tiny", "fp32"), ("tiny", "bf16"),
             ("tiny", "tf32"))]  # fmt: skip
    found = compared(tmp_path, runs, baseline=asked)
    assert [part.work for part in found.machines] == ["tiny", "gpt2"]
    settings = [part.baseline.settings["precision"] for part in found.machines]
    assert settings == chosen
    assert [row.variant.work for row in found.rows] == ["tiny"] * 3 + ["gpt2"] * 2


TWICE = ["as typed", "other", "as typed"]


@pytest.mark.parametrize(
    ("asked", "rows"),
    [
        pytest.param("as typed", TWICE, id="a name of two"),
        pytest.param("precision=fp32", TWICE, id="two with a name"),
        pytest.param("nobody", TWICE, id="nobody"),
        pytest.param("nobody", ["as typed", "optimizer=lion precision=bf16", "x"], id="a = in it"),
    ],
)
def test_proposed_baseline_is_a_valid_flag(tmp_path, asked, rows):
    runs = [
        Run({"precision": "fp32", "optimizer": "adamw"}, speed=None, outcome="oom"),
        Run({"precision": "bf16", "optimizer": "lion"}),
        Run({"precision": "fp32", "optimizer": "lion"}),
    ]
    folder = make_sweep(tmp_path, runs, rows)
    with pytest.raises(ConfigError) as refused:
        compare_runs([folder], baseline=asked)
    flag, proposed = shlex.split(str(refused.value).rpartition("-> ")[2])
    assert flag == "--baseline"
    assert len(compare_runs([folder], baseline=proposed).machines) == 1


def test_failed_baseline_is_noted(tmp_path):
    runs = [Run({"precision": "fp32"}, outcome="oom", speed=None, loss=None),
            Run({"precision": "bf16"}), Run({"precision": "fp16"})]  # fmt: skip
    found = compared(tmp_path, runs, ["baseline", "b", "c"])
    assert found.machines[0].baseline.label == "b"
    assert "the baseline failed" in found.notes[0]
    asked = compare_runs([tmp_path], baseline="baseline")
    assert asked.machines[0].baseline is None
    assert "--baseline" in verdict_lines(asked)[0]


def test_each_machine_has_its_own_baseline(tmp_path):
    other = {**MACHINE, "device": "another"}
    runs = [Run({"precision": p}, machine=m, speed=s, repeat=r)
            for r in range(3)
            for p, m, s in (("fp32", MACHINE, 10), ("bf16", MACHINE, 20), ("fp32", other, 100),
                            ("bf16", other, 300))]  # fmt: skip
    found = compared(tmp_path, runs)
    ratios = {label: row.ratios.get(SPEED) for label, row in by_label(found).items()}
    assert list(ratios) == ["fp32 [A]", "bf16 [A]", "fp32 [B]", "bf16 [B]"]
    assert ratios["bf16 [A]"].value == pytest.approx(2)
    assert ratios["bf16 [B]"].value == pytest.approx(3)
    assert "compared separately" in found.notes[0]
    assert [line.split(":")[0] for line in verdict_lines(found)] == ["Machine A", "Machine B"]


def test_steps_of_different_clocks_are_not_compared(tmp_path):
    runs = [Run({"precision": "fp32"}, speed=10, clock=None, repeat=r) for r in range(3)]
    runs += [Run({"precision": "bf16"}, speed=20, repeat=r) for r in range(3)]
    found = compared(tmp_path, runs)
    assert [dict(row.ratios) for row in found.rows if not row.is_baseline] == []
    assert "A former, B wall" in found.notes[1]
    assert not any("2.00x" in line for line in verdict_lines(found))


def test_machines_of_one_device_are_told_by_their_software(tmp_path):
    another = {**MACHINE, "torch": "2.14.0", "peft": "0.21"}
    runs = [Run({"precision": "fp32"}, machine=m) for m in (MACHINE, another)]
    notes = compared(tmp_path, runs).notes
    assert any("torch: A 2.13.0, B 2.14.0" in note for note in notes)
    assert any("peft: A without, B 0.21" in note for note in notes)
    assert not any("device_count" in note for note in notes), "equal facts are not listed"


# --- losses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "parity"),
    [
        (2.000001, Parity.equal),
        (2.01, Parity.within),
        (1.99, Parity.within),
        (2.2, Parity.worse),
        (1.8, Parity.better),
        (None, Parity.unknown),
        (float("nan"), Parity.unknown),
    ],
)
@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_loss_is_compared_with_the_baseline(tmp_path, loss, parity, seeds):
    """Three repeats of a seed are one observation of the loss: of two seeds nothing is claimed."""
    runs = [Run({"precision": p}, repeat=r, loss=value, seed=r % seeds) for r in range(3)
            for p, value in (("fp32", 2.0), ("bf16", loss))]  # fmt: skip
    quality = by_label(compared(tmp_path, runs))["bf16"].quality
    if seeds < 3 and parity not in (Parity.equal, Parity.unknown):
        parity = Parity.few
        assert quality.why == {1: "one seed", 2: "2 seeds"}[seeds]
    assert quality.parity is parity


def test_loss_of_a_seed_is_one_observation(tmp_path):
    runs = [Run(repeat=r, seed=r % 2, loss=2.0 + r % 2) for r in range(4)]
    estimate = compared(tmp_path, runs).rows[0].estimates["loss.eval_final"]
    assert estimate.n == 2
    assert estimate.value == pytest.approx(2.5)


def judged_by(tmp_path, metric, values):
    """Rows of runs of three seeds: option -> the metric's values."""
    runs = [
        Run({"precision": p}, repeat=n, seed=n, speed=100 + 50 * (p != "fp32"),
            metrics={"accuracy": 0.5, metric: value})
        for p, each in values.items() for n, value in enumerate(each)
    ]  # fmt: skip
    return by_label(compared(tmp_path, runs, by=metric))


@pytest.mark.parametrize(
    ("metric", "values", "parity", "words"),
    [
        ("accuracy", (0.8, 0.81, 0.79), Parity.worse, "accuracy lower: -10 points"),
        ("accuracy", (0.95, 0.96, 0.94), Parity.better, "accuracy higher: +5.0 points"),
        ("accuracy", (0.9, 0.91, 0.89), Parity.equal, "accuracy equal"),
        (
            "accuracy",
            (0.7, 1.1, 0.89),
            Parity.undecided,
            "accuracy not decided: -49 to +48 points with 3 seeds",
        ),
        ("perplexity", (0.8, 0.81, 0.79), Parity.better, "perplexity lower: -11 %"),
        ("perplexity", (0.95, 0.96, 0.94), Parity.worse, "perplexity higher: +5.6 %"),
        ("pearson", (0.0, -0.1, -0.2), Parity.worse, "pearson lower: -1.0 ("),
    ],
)
def test_metric_replaces_the_loss(tmp_path, metric, values, parity, words):
    rows = judged_by(tmp_path, metric, {"fp32": (0.9, 0.91, 0.89), "bf16": values})
    best = "bf16" if parity is Parity.better else "fp32"
    assert next(iter(rows)) == best, "sorted by the metric"
    quality = rows["bf16"].quality
    assert quality.parity is parity
    assert loss_words(quality).startswith(words)
    assert rows["bf16"].estimates[f"metrics.{metric}"].value == pytest.approx(sum(values) / 3)


def test_faster_row_with_worse_metric_is_not_the_best(tmp_path):
    runs = [
        Run({"precision": p}, repeat=n, seed=n, speed=speed + n, metrics={"accuracy": accuracy})
        for p, speed, accuracy in (("fp32", 100, 0.9), ("bf16", 200, 0.5)) for n in range(3)
    ]  # fmt: skip
    first, second = verdict_lines(compared(tmp_path, runs, by="accuracy"))
    assert first.startswith("fp32 has the highest accuracy: the next is bf16, -40 points")
    assert "-40 points" in second
    assert "is fastest: 1.99x" in verdict_lines(compared(tmp_path / "loss", runs))[0]


def test_losses_of_different_sample_counts_are_not_compared(tmp_path):
    runs = [Run({"precision": "fp32"}), Run({"precision": "bf16"}, steps=50)]
    rows = compared(tmp_path, runs).rows
    assert rows[1].quality.parity is Parity.other
    assert rows[1].quality.why


@pytest.mark.parametrize(
    "other",
    [{"keys": {"data.seq_len": 128}}, {"choices": {"model": "gpt2"}}, {"data": "e"},
     {"keys": {"task.mask_frac": 0.3}}],
    ids=["length", "model", "content", "task"],
)  # fmt: skip
def test_different_work_is_a_separate_group(tmp_path, other):
    """It has no ratio to another group's baseline, no loss and no place on its front."""
    fast = [replace(run, **other) for run in repeated(other.get("choices", {}), 900.0, peak=MIB)]
    rows = compared(tmp_path, [*repeated({}), *fast, *repeated({"precision": "bf16"}, 200.0)]).rows
    alone = rows[-1]
    assert len({row.variant.work for row in rows}) == 2
    assert not alone.ratios
    assert not alone.on_front
    assert alone.quality.estimate is None
    assert [row.on_front for row in rows] == [False, True, False]


def test_losses_at_equal_time_use_the_shortest_run(tmp_path):
    make_run(tmp_path / "a", Run({"precision": "fp32"}), [4.0 - 0.1 * n for n in range(20)])
    make_run(tmp_path / "b", Run({"precision": "bf16"}), [4.0 - 0.2 * n for n in range(10)])
    found = compare_runs([tmp_path])
    assert found.machines[0].equal_time_s == pytest.approx(5.0)
    slow, fast = (row.loss_at_equal_time for row in found.rows)
    assert slow == pytest.approx(3.1)
    assert fast == pytest.approx(2.2)


# --- effects --------------------------------------------------------------------------------------


def test_main_effects_use_pairs_that_differ_in_one_factor(tmp_path):
    runs = [Run({"precision": p, "optimizer": o}, speed=s, repeat=r)
            for r in range(3) for p, o, s in PRODUCT]  # fmt: skip
    part = compared(tmp_path, runs).machines[0]
    effects = {effect.factor: effect for effect in part.effects}
    assert effects["precision"].pairs == 2
    assert effects["precision"].ratios[SPEED].value == pytest.approx((2 * 3) ** 0.5)
    assert effects["optimizer"].ratios[SPEED].value == pytest.approx((0.9 * 1.35) ** 0.5)


def test_comparison_has_the_same_interval_everywhere(tmp_path):
    random = np.random.default_rng(3)
    rows = [{}, {"precision": "bf16"}, {"precision": "fp16"}, {"optimizer": "lion"},
            {"optimizer": "sgd", "memory": "checkpointing"}]  # fmt: skip
    runs = [Run(choices, speed=100 * np.exp(0.02 * random.normal()), repeat=r)
            for r in range(3) for choices in rows]  # fmt: skip
    found = compared(tmp_path, runs)
    table = {(k, v): row.ratios[SPEED] for row in found.rows if not row.is_baseline
             for k, v in row.variant.factors.items()}  # fmt: skip
    effects = found.machines[0].effects
    assert {(e.factor, e.value) for e in effects} >= {
        ("precision", "bf16"), ("precision", "fp16"), ("optimizer", "lion"),
    }  # fmt: skip
    for effect in effects:
        assert effect.ratios[SPEED] == table[effect.factor, effect.value]


def guide_rows(refused):
    """Rows of sweep=guide_table in which other rows type what these rows' options bring."""
    guide = {"batch.per_device": 4, "batch.accumulation": 1}
    rows = {
        "baseline": ({}, {**guide, "precision.tf32": "off"}, ()),
        "bf16": ({"precision": "bf16"}, {**guide, "precision.tf32": "auto"}, ()),
        "fp16": ({"precision": "fp16"}, {**guide, "precision.tf32": "auto"}, ()),
        "accumulation": (
            {"batch": "guide_accumulation"},
            {"batch.per_device": 1, "batch.accumulation": 4, "precision.tf32": "off"},
            (),
        ),
        "recipe": (
            {},
            {"batch.per_device": 4, "batch.accumulation": 16, "precision.tf32": "off"},
            ("batch.per_device=4", "batch.accumulation=16"),
        ),
        "bf16_tf32": (
            {"precision": "bf16"}, {**guide, "precision.tf32": "on"}, ("precision.tf32=on",)
        ),
    }  # fmt: skip
    runs = [
        Run(choices, keys=keys,
            overrides=(*(f"{k}={v}" for k, v in choices.items()), *typed),
            outcome="refused" if row == "bf16_tf32" and refused else "ok", reason="no")
        for row, (choices, keys, typed) in rows.items()
    ]  # fmt: skip
    return runs, list(rows)


@pytest.mark.parametrize("refused", [True, False])
def test_keys_set_by_an_option_belong_to_the_option(tmp_path, refused):
    runs, rows = guide_rows(refused)
    found = compared(tmp_path, runs, rows)
    part = found.machines[0]
    assert ("precision.tf32" in found.factors) is not refused, "a job without a record"
    effects = {f"{e.factor}={e.value}" for e in part.effects}
    assert effects == {
        "precision=bf16", "precision=fp16", "batch=guide_accumulation", "batch.accumulation=16",
    }  # fmt: skip
    alone = {row.variant.row: change for row, change in part.alone}
    assert alone == {
        "bf16": "precision=bf16",
        "fp16": "precision=fp16",
        "accumulation": "batch=guide_accumulation",
        "recipe": "batch.accumulation=16",
    }
    if not refused:
        assert [added for _, added in part.ladder] == ["precision=bf16", "precision.tf32=on"]


def test_explicit_grid_keeps_pairs_with_implied_values(tmp_path):
    """adamw brings 0.001; nobody left lion without a typed one."""
    grid = [Run({"optimizer": o}, keys={"optimizer.lr": lr}) for o in ("adamw", "lion")
            for lr in (1e-3, 1e-4)]  # fmt: skip
    grid[0] = replace(grid[0], overrides=("optimizer=adamw",))
    effects = {e.factor: e.pairs for e in compared(tmp_path, grid).machines[0].effects}
    assert effects == {"optimizer": 2, "optimizer.lr": 2}


def test_comparison_by_one_factor(tmp_path):
    runs = [Run({"precision": p, "optimizer": o}, speed=s) for p, o, s in PRODUCT]
    assert compared(tmp_path / "three", runs[:3]).machines[0].ladder == (), "one rung is none"
    found = compared(tmp_path, runs, by="optimizer")
    assert {effect.factor for effect in found.machines[0].effects} == {"optimizer"}
    with pytest.raises(ConfigError, match="differing: precision, optimizer"):
        compare_runs([tmp_path], by="attention")


def test_single_and_cumulative_effects(tmp_path):
    rows = {
        "baseline": {},
        "accumulation": {"batch": "guide_accumulation"},
        "both": {"batch": "guide_accumulation", "memory": "checkpointing"},
        "all": {"batch": "guide_accumulation", "memory": "checkpointing", "precision": "fp16"},
        "fp16": {"precision": "fp16"},
    }
    found = compared(tmp_path, [Run(choices) for choices in rows.values()], list(rows))
    part = found.machines[0]
    assert [row.variant.row for row, _ in part.alone] == ["accumulation", "fp16"]
    assert [(row.variant.row, added) for row, added in part.ladder] == [
        ("accumulation", "batch=guide_accumulation"),
        ("both", "memory=checkpointing"),
        ("all", "precision=fp16"),
    ]


def test_pareto_front_holds_undominated_rows(tmp_path):
    points = {"small": (50, 10), "middle": (80, 20), "beaten": (90, 15), "large": (100, 30),
              "same": (100, 30)}  # fmt: skip
    runs = [Run({"precision": "fp32"}, peak=peak * MIB, speed=speed, keys={"memory.every_n": n})
            for n, (peak, speed) in enumerate(points.values(), 1)]  # fmt: skip
    rows = compared(tmp_path, runs, list(points)).rows
    assert [row.variant.row for row in rows if row.on_front] == ["small", "middle", "large", "same"]


@pytest.mark.parametrize(
    ("points", "front"),
    [
        ({"a": (4016764, 100, 1), "b": (4016764, 130, 1), "c": (4016763, 110, 1)}, "b"),
        ({"a": (1000000, 100, 1), "b": (1000500, 101, 1)}, "ab"),
        ({"a": (1000000, 100, 1), "b": (1500000, 101, 1)}, "a"),
        ({"a": (1000000, 100, 1), "b": (1500000, 120, 30)}, "a"),
        ({"a": (1000000, 100, 1), "b": (1500000, 120, 1)}, "ab"),
        ({"a": (1000000, 100, 1), "b": (990000, 100, 1)}, "b"),
    ],
    ids=["a byte", "both equal", "same speed", "not resolved", "resolved", "less memory"],
)
def test_insignificant_difference_is_not_on_the_front(tmp_path, points, front):
    """In (bytes, speed, noise in per cent) of three repeats."""
    runs = [Run({"precision": "fp32"}, repeat=n, peak=peak, speed=speed * (1 + noise * e / 100),
                keys={"memory.every_n": place})
            for place, (peak, speed, noise) in enumerate(points.values(), 1)
            for n, e in enumerate((-1, 0.3, 0.7))]  # fmt: skip
    rows = compared(tmp_path, runs, [name for name in points for _ in range(3)]).rows
    assert "".join(row.variant.row for row in rows if row.on_front) == front


def test_packed_rows_are_compared_by_tokens(tmp_path):
    """A packed row counts as one sample: 0.34x the samples are 1.36x the tokens."""
    runs = [
        Run(keys={"data.packing": packing}, repeat=n, speed=speed * (1 + n / 200), tokens=tokens)
        for packing, speed, tokens in (("off", 100.0, 50.0), ("on", 34.0, 200.0)) for n in range(3)
    ]  # fmt: skip
    found = compared(tmp_path, runs)
    part, row = found.machines[0], found.rows[1]
    assert part.speed.key == TOKENS
    assert set(row.ratios) == {TOKENS, PEAK, RESERVED} & set(row.ratios)
    assert row.ratios[TOKENS].value == pytest.approx(1.36)
    assert [row.on_front for row in found.rows] == [False, True]
    assert part.effects[0].ratios[TOKENS].value == pytest.approx(1.36)
    assert row.quality.parity is Parity.other, "of other numbers of samples"
    assert verdict_lines(found)[0].startswith("packing=on is fastest: 1.36x")


def test_step_times_need_both_sides(tmp_path):
    runs = [Run(), Run({"precision": "bf16"}, predicted_step=1.25, shared=True)]
    rows = compared(tmp_path, runs).rows
    assert rows[0].prediction_error == pytest.approx(0.0)
    assert [row.step_prediction_error for row in rows] == [None, None]


# --- beside others --------------------------------------------------------------------------------


def test_published_rows_are_compared_as_effects(tmp_path):
    rows = {"baseline": {}, "fp16": {"precision": "fp16"}, "adafactor": {"optimizer": "adafactor"}}
    speeds = {"baseline": 100.0, "fp16": 150.0, "adafactor": 80.0}
    runs = [Run(choices, speed=speeds[row], repeat=r) for r in range(3)
            for row, choices in rows.items()]  # fmt: skip
    found = compare_runs([make_sweep(tmp_path, runs, [*rows] * 3, name="guide_table")])
    (table,) = found.machines[0].published
    assert table.table.source.startswith("https://huggingface.co/docs/transformers")
    by_row = {row.row: row for row in table.rows}
    assert by_row["fp16"].measured[SPEED].value == pytest.approx(1.5)
    assert by_row["fp16"].published[SPEED] == pytest.approx(18.64 / 8.86)
    assert by_row["adafactor"].published[PEAK] == pytest.approx(12295 / 14949)
    other = make_sweep(tmp_path / "other", runs, [*rows] * 3, name="precision_ladder")
    assert compare_runs([other]).machines[0].published == ()


def test_identical_rows_are_merged_with_both_names(tmp_path):
    runs = [Run({}), Run({"precision": "fp16"}), Run({"precision": "fp16"})]
    sweep = make_sweep(tmp_path, runs, ["baseline", "half", "again"])
    text = (sweep / "sweep.json").read_text().replace(f"{2:016x}", f"{1:016x}")
    (sweep / "sweep.json").write_text(text)
    found = compare_runs([sweep])
    assert [row.variant.label for row in found.rows] == ["baseline", "half = again"]
    assert compare_runs([sweep], baseline="again").machines[0].baseline.label == "half = again"


# --- time -----------------------------------------------------------------------------------------


def test_curve_excludes_compile_time(tmp_path):
    """A first step of 80 s among steps of 0.5 s counts as long as these."""
    paths = RunPaths(make_run(tmp_path / "run", Run()))
    rows = [{"train/global_step": n + 1, "attempt": 0, "train/loss": 2.0 - n / 10,
             "train/step_time_s": 0.5 if n else 80.0} | ({} if n else {"train/warmup": 1})
            for n in range(6)]  # fmt: skip
    paths.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_curve(paths).seconds == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.5, 3.0])


def test_step_phases_are_shown_per_sample(tmp_path):
    """Whatever a step's number of samples: together they are the inverse of samples/s."""
    runs = [Run({"precision": p}, speed=s) for p, s in (("fp32", 100.0), ("bf16", 400.0))]
    bars = phases(compared(tmp_path, runs).rows)[0]["data"]["values"]
    for name, speed in (("fp32", 100.0), ("bf16", 400.0)):
        mine = [bar["time"] / 1000 for bar in bars if bar["name"] == name]
        assert mine == pytest.approx([1 / 3 / speed, 2 / 3 / speed])


def at(minute):
    return {"environment": {"time": f"2026-11-01T{minute // 60:02}:{minute % 60:02}:00+00:00"}}


@pytest.mark.parametrize(("minutes", "apart"), [((0, 1), 0), ((40, 5), 35)])
def test_pair_measured_far_apart_is_noted(tmp_path, monkeypatch, minutes, apart):
    runs = [Run({"precision": p}) for p in ("fp32", "bf16")]
    folder = make_sweep(tmp_path, runs)
    for number, minute in enumerate(minutes):
        paths = RunPaths(tmp_path / f"{number:016x}")
        paths.record.write_text(json.dumps(json.loads(paths.record.read_text()) | at(minute)))
    told = [n for n in compare_runs([folder]).notes if "before or after the baseline's" in n]
    assert bool(told) == bool(apart)
    if told:
        assert f" {apart} min " in told[0]


def test_noisy_baseline_is_reported_first(tmp_path):
    wild = [Run({"precision": "fp32"}, repeat=n, speed=s) for n, s in enumerate((264, 1432, 1825))]
    first = verdict_lines(compared(tmp_path, [*wild, *repeated({"precision": "bf16"}, 900.0)]))[0]
    assert first.startswith("The machine was not quiet: fp32's own repeats differ by 6.9x")
