"""What is a repeat of what, and what sets configurations apart."""

import pytest
from unit.results.report.made import MACHINE, Run, make_run, make_sweep

from eke.results.report.compare import load_records
from eke.results.report.compare.load_records import gather
from eke.results.report.compare.variants import group


def grouped(tmp_path, runs, rows=()):
    return group(gather([make_sweep(tmp_path, runs, rows)]).entries)


def test_seed_and_repeat_do_not_split_configurations(tmp_path):
    runs = [Run({"precision": p}, repeat=r, seed=s) for r in (0, 1) for s in (0, 1)
            for p in ("fp32", "bf16")]  # fmt: skip
    variants, _, keys = grouped(tmp_path, runs)
    assert keys == ["precision"]
    assert [(v.label, len(v.records)) for v in variants] == [
        ("fp32", 4),
        ("bf16", 4),
    ]
    assert len(variants[0].sample("throughput.samples_per_s")) == 4


def test_option_and_its_keys_are_one_factor(tmp_path):
    """batch=guide sets the micro-batch: one factor, not two."""
    runs = [
        Run({"batch": "fixed"}, keys={"batch.per_device": 8}),
        Run({"batch": "guide"}, keys={"batch.per_device": 4}),
    ]
    assert grouped(tmp_path, runs)[2] == ["batch"]


def test_key_beyond_its_option_is_a_factor(tmp_path):
    runs = [
        Run({"optimizer": o}, keys={"optimizer.lr": lr})
        for o in ("adamw", "adafactor")
        for lr in (1e-3, 1e-4)
    ]
    _, _, keys = grouped(tmp_path, runs)
    assert keys == ["optimizer", "optimizer.lr"]


def test_names_hold_only_values_that_differ_from_the_baseline(tmp_path):
    """Numbers keep the last part of their key, and so do values that say little without it."""
    grid = [Run({"optimizer": o, "memory": m}) for o in ("adamw", "adafactor")
            for m in ("none", "checkpointing")]  # fmt: skip
    more = [Run(keys={"data.packing": "on"}), Run(keys={"batch.per_device": 2})]
    assert [variant.label for variant in grouped(tmp_path, [*grid, *more])[0]] == [
        "adamw + packing=off + per_device=8", "checkpointing", "adafactor",
        "adafactor + checkpointing", "packing=on", "per_device=2",
    ]  # fmt: skip


def test_disabled_option_is_named_against_the_baseline(tmp_path):
    """A key that follows from the adapters, as the norm does here, is not the only name."""
    runs = [Run({"peft": peft}, keys={"train.max_grad_norm": norm})
            for peft, norm in (("lora", 0.3), ("none", 1.0))]  # fmt: skip
    labels = [variant.label for variant in grouped(tmp_path, runs)[0]]
    assert labels[1].split(" + ")[0] == "peft=none"


def test_ambiguous_names_include_keys(tmp_path):
    runs = [Run({"attention": "sdpa", "compile": "none"}),
            Run({"attention": "eager", "compile": "none"}),
            Run({"attention": "sdpa", "compile": "eager"})]  # fmt: skip
    labels = [variant.label for variant in grouped(tmp_path, runs)[0]]
    assert ["attention=eager" in labels[1], "compile=eager" in labels[2]] == [True, True]


def names_of(tmp_path, *runs):
    """Of runs that each has its model, the model's keys, and those of these that were typed."""
    made = [
        Run(
            {"model": model},
            keys={f"model.{key}": value for key, value in keys.items()},
            overrides=(f"model={model}", *(f"model.{key}={keys[key]}" for key in typed)),
        )
        for model, keys, typed in runs
    ]
    return [variant.label for variant in grouped(tmp_path, made)[0]]


@pytest.mark.parametrize("typed", [[], ["hidden_size"]], ids=["no", "typed"])
def test_group_name_is_minimal(tmp_path, typed):
    """One size of GPT-2 beside two of Llama, each a group."""
    runs = [
        ("tiny", {"hidden_size": 128}, []),
        ("tiny", {"hidden_size": 64}, ["hidden_size"]),
        ("tiny_gpt2", {"hidden_size": 32}, typed),
    ]
    assert names_of(tmp_path, *runs) == [
        "tiny, hidden_size=128",
        "tiny, hidden_size=64",
        "tiny_gpt2, hidden_size=32",
    ]


def test_name_excludes_derived_values(tmp_path):
    """A checkpoint's hash beside its folder; where the folder is the same, the hash tells."""
    a, b, b_later = ({"name_or_path": name, "content": c} for name, c in ("a1", "b2", "b3"))
    typed = ["name_or_path"]
    assert names_of(tmp_path / "1", ("pretrained", a, typed), ("pretrained", b, typed)) == [
        "a",
        "b",
    ]
    runs = [("pretrained", each, typed) for each in (a, b, b_later)]
    assert names_of(tmp_path / "2", *runs)[1:] == [
        "b, content=2",
        "b, content=3",
    ]


def test_naming_time_is_linear(tmp_path, monkeypatch):
    """Ten thousand records: a report took 27 s instead of 7 when each was compared with all."""
    looks = {}
    original = load_records.typed_settings

    def counted(overrides):
        looks[size] = looks.get(size, 0) + 1
        return original(overrides)

    monkeypatch.setattr(load_records, "typed_settings", counted)
    for size in (10, 100):
        runs = [Run({"precision": ("fp32", "bf16")[n % 2]}, keys={"optimizer.lr": 1e-5 * (1 + n)})
                for n in range(size)]  # fmt: skip
        assert len(grouped(tmp_path / str(size), runs)[0]) == size
    assert looks[100] == pytest.approx(10 * looks[10], rel=0.2)


def test_presentation_is_not_a_factor(tmp_path):
    runs = [Run(keys={"tracker.project": name, "train.log_every": n}) for n, name in
            enumerate(("a", "b"), 1)]  # fmt: skip
    variants, _, keys = grouped(tmp_path, runs)
    assert keys == []
    assert [len(v.entries) for v in variants] == [2]


def test_machines_are_never_merged(tmp_path):
    other = {**MACHINE, "torch": "2.14.0"}
    another_eke = {**MACHINE, "eke_source": "b"}  # on the same machine
    runs = [Run(repeat=0), Run(repeat=1, machine=other), Run(repeat=2, machine=another_eke)]
    variants, machines, _ = grouped(tmp_path, runs)
    assert machines[0].sources == ("a", "b")
    assert [(v.machine, len(v.entries)) for v in variants] == [("A", 2), ("B", 1)]
    assert [m.facts["torch"] for m in machines] == ["2.13.0", "2.14.0"]
    assert variants[0].label.endswith("[A]")


def test_rejected_run_is_named_by_its_overrides(tmp_path):
    runs = [
        Run({"precision": "fp32"}),
        Run({"precision": "bf16"}),
        Run({"precision": "fp8", "attention": "flash3"}, outcome="refused", reason="no"),
    ]
    variants, _, keys = grouped(tmp_path, runs)
    assert keys == ["precision"]
    assert variants[2].label == "fp8 + flash3"
    assert variants[0].factors == {"precision": "fp32"}


def test_failed_and_successful_repeats_are_kept(tmp_path):
    runs = [Run(repeat=0), Run(repeat=1, outcome="oom", reason="full", speed=None, loss=None),
            Run(repeat=2, outcome="not run"), Run({"precision": "bf16"})]  # fmt: skip
    variants, _, _ = grouped(tmp_path, runs)
    assert variants[0].outcomes == {"ok": 1, "oom": 1, "not run": 1}
    assert len(variants) == 2


def test_configurations_with_one_name_are_distinguished(tmp_path):
    """Two searches of `eke fit`, or a named sweep of two models, under one folder."""
    shown = [
        (
            "as typed",
            Run({"model": "tiny", "attention": "eager", "precision": "fp32"}),
            "as typed, attention=eager",
        ),
        (
            "as typed",
            Run({"model": "tiny", "attention": "sdpa", "precision": "fp32"}),
            "as typed, attention=sdpa",
        ),
        (
            "as typed",
            Run({"model": "gpt2", "attention": "sdpa", "precision": "bf16"}, outcome="not run"),
            "as typed",
        ),
        ("half", Run({"model": "tiny", "attention": "sdpa", "precision": "bf16"}), "half"),
    ]
    variants, _, _ = grouped(tmp_path, [run for _, run, _ in shown], [row for row, _, _ in shown])
    assert [variant.label for variant in variants] == [label for _, _, label in shown]


def test_row_on_two_machines_has_separate_names(tmp_path):
    runs = [Run({"precision": "fp32"}), Run({"precision": "fp32"}, machine={"device": "another"})]
    variants, _, _ = grouped(tmp_path, runs, ["whole", "whole"])
    assert [variant.label for variant in variants] == ["whole [A]", "whole [B]"]


def test_repeated_run_counts_twice_without_disturbed_speeds(tmp_path):
    runs = [Run(speed=100.0), Run(speed=102.0), Run(speed=90.0, shared=True)]
    variants, _, _ = grouped(tmp_path, runs)
    assert len(variants[0].sample("memory.measured.peak_allocated_bytes")) == 3
    assert sorted(variants[0].sample("throughput.samples_per_s").values()) == [100.0, 102.0]


def test_non_finite_numbers_are_missing(tmp_path):
    odd = [float("nan"), float("inf"), 0.0, -1.0]
    runs = [Run(repeat=n, seed=n, speed=value or -1, loss=value) for n, value in enumerate(odd)]
    variants, _, _ = grouped(tmp_path, runs)
    assert not variants[0].sample("throughput.samples_per_s")
    assert variants[0].sample("loss.eval_final") == {2: 0.0, 3: -1.0}, "of a regression"


def test_rows_keep_their_command_line_order(tmp_path):
    runs = [
        Run({}, overrides=("precision=bf16", "memory=none")),
        Run({"memory": "checkpointing", "precision": "bf16"},
            overrides=("precision=bf16", "memory=checkpointing")),
        Run({"precision": "bf16", "memory": "none"}, overrides=("precision=bf16", "memory=none")),
    ]  # fmt: skip
    assert grouped(tmp_path, runs)[2] == ["precision", "memory"]


def test_unreadable_runs_are_not_repeats(tmp_path):
    """Not of each other, and not of the run for which nothing was typed."""
    make_run(tmp_path, Run(overrides=()))
    for name in ("torn", "cut"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.json").write_text("[]")
    variants, _, _ = group(gather([tmp_path]).entries)
    assert sorted(len(v.entries) for v in variants) == [1, 1, 1]
    assert [v.label for v in variants if not v.records] == ["cut", "torn"]
    reasons = {e.reason.partition(": ")[2] for v in variants for e in v.entries if not e.record}
    assert reasons == {"not a readable record (not an object)"}
