"""Verdicts: fifteen record sets, one for each sentence that may begin one, and their parts."""

import json
import math
import re
from dataclasses import replace

import pytest
from unit.results.report.made import MIB, Run, compared, make_run, make_sweep, repeated

from eke.common.output import escape
from eke.common.paths import SweepPaths
from eke.results.report.compare import compare_runs
from eke.results.report.compare.sentences import verdict_lines
from eke.results.report.show.file_formats import as_plain, render_markdown, render_page
from eke.results.report.show.terminal import render_terminal
from eke.results.report.wandb_report import WandbProject, dump, specification

SPEED, PEAK, LOSS = (
    "throughput.samples_per_s", "memory.measured.peak_allocated_bytes", "loss.eval_final",
)  # fmt: skip
QUIET, OPEN = (0.0, 0.001, -0.001), (-0.02, 0.03, 0.01)


def rows(losses=QUIET, seeds=True, rounds=3, **variants):
    """Runs of rows that are named by an option: (speed, memory in MiB, loss, losses' spread)."""
    runs = []
    for n in range(rounds):
        for name, (speed, peak, loss, *spread) in variants.items():
            group, _, option = name.partition("_")
            shake = (1.0, 1.004, 0.997)[(n + len(option)) % 3]
            change = (spread[0] if spread else losses)[n] if group != "base" else 0.0
            loss = loss * (1 + change + 0.0003 * n) if seeds else loss
            runs.append(
                Run({} if group == "base" else {group: option}, repeat=n, seed=n * seeds,
                    speed=speed * shake, peak=int(peak * MIB), loss=loss)
            )  # fmt: skip
    return runs


def lrs(*losses, spread=QUIET, failed=()):
    """Runs of learning rates 0.001, 0.002, ...; the last ones diverged."""
    found = [
        Run(keys={"optimizer.lr": 0.001 * place}, repeat=n, seed=n, loss=loss * (1 + e),
            speed=100.0 * (1 + 0.002 * n))
        for place, loss in enumerate(losses, 1)
        for n, e in enumerate(spread if place > 1 else QUIET)
    ]  # fmt: skip
    return found + [
        Run(keys={"optimizer.lr": lr}, repeat=n, seed=n, outcome="diverged", speed=None, loss=None)
        for lr in failed for n in range(3)
    ]  # fmt: skip


def only(runs, count, **choices):
    """Runs without the last repeats of one option."""
    kept = [r for r in runs if not (r.repeat >= count and dict(r.choices) == choices)]
    waiting = [r for r in runs if r.repeat >= count and dict(r.choices) == choices]
    return kept + [Run(r.choices, repeat=r.repeat, seed=r.seed, outcome="not run") for r in waiting]


OTHER = {"model": "tiny_bert", "task": "masked_lm"}
PLAIN = (100.0, 100, 2.0)
SETS = {
    "1 faster, loss no worse": (
        rows(base=PLAIN, precision_bf16=(131.0, 62, 2.0), precision_fp16=(101, 70, 2.0),
             memory_checkpointing=(80, 50, 2.0)),
        [("best", SPEED, "bf16", 1.31), ("beside", PEAK, "bf16", 0.62)],
        r"bf16 is fastest: 1\.3\dx \(.*\) the speed of fp32 at 0\.62x its memory; eval loss within",
    ),
    "2 faster, loss open": (
        rows(OPEN, base=PLAIN, precision_bf16=(131.0, 62, 2.0), precision_fp8=(120.0, 60, 2.0),
             optimizer_lion=(90, 80, 2.0)),
        [("best", SPEED, "bf16", 1.31), ("beside", LOSS, "bf16", 0.7)],
        r"bf16 is fastest: .*; eval loss not decided: -\S+ to \S+ % with 3 seeds "
        r"\(\d+ seeds would show \d+ %\)",
    ),
    "3 faster, one seed": (
        rows(seeds=False, base=PLAIN, precision_bf16=(131.0, 62, 2.02)),
        [("best", SPEED, "bf16", 1.31)],
        r"bf16 is fastest: .*; losses not compared: one seed \(sweep.seeds=per_repeat\)",
    ),
    "4 the fastest learns worse": (
        rows(base=PLAIN, precision_bf16=(131.0, 62, 2.0), precision_fp8=(142.0, 60, 2.062),
             optimizer_lion=(90, 100, 2.0)),
        [("best", SPEED, "bf16", 1.31), ("at_worse_loss", SPEED, "fp8", 1.42),
         ("beside", LOSS, "fp8", 3.1)],
        r"Fastest without a higher eval loss: bf16, 1\.3\dx .*\n"
        r"fp8 is faster, 1\.4\dx \(.*\), but its eval loss is higher: \+3\.1 % \(",
    ),
    "5 nothing faster, memory saved": (
        rows(base=PLAIN, memory_checkpointing=(74.0, 38, 2.0), optimizer_adafactor=(86, 81, 2.0)),
        [("best", PEAK, "checkpointing", 0.38), ("beside", SPEED, "checkpointing", 0.74),
         ("none_better", SPEED, "adafactor", 0.86)],
        r"checkpointing needs 0\.38x the memory of adamw \(38 of 100 MiB\) at 0\.7\dx "
        r"\(.*\) its speed; eval loss within",
    ),
    "6 nothing resolved": (
        [Run({} if p == "a" else {"memory": p}, repeat=n, seed=n, speed=s * (1 + e), peak=100 * MIB)
         for p, s, e3 in (("a", 100, QUIET), ("checkpointing", 104, (-0.1, 0.12, 0.05)),
                          ("b", 86, (0.15, -0.1, 0.02)), ("c", 99, (0.1, 0.0, -0.09)))
         for n, e in enumerate(e3)],
        [("not_better", SPEED, "checkpointing", 1.06)],
        r"No difference in speed is shown among 4 configurations \(0\.8\dx to 1\.0\dx, intervals "
        r"up to \+-\d+ %\)",
    ),
    "7 all the same": (
        rows(base=PLAIN, attention_eager=(100.1, 100, 2.0), memory_empty_cache=PLAIN,
             compile_aot_eager=(100.2, 100, 2.0)),
        [("same", SPEED, "aot_eager", 1.0)],
        r"All 4 run at the same speed within 2 % and in the same memory; choose by other reasons",
    ),
    "8 learning rates, decided": (
        lrs(5.0, 4.25, 4.7),
        [("best", LOSS, "lr=0.002", -15.0)],
        r"lr=0\.002 has the lowest eval loss: -15 % \(.*\) against lr=0\.001"
        r"; the speed does not depend on optimizer\.lr",
    ),
    "9 learning rates, open, one diverged": (
        lrs(5.0, 4.94, 5.01, spread=OPEN, failed=[0.1]),
        [("not_better", LOSS, "lr=0.002", -0.5), ("failed", SPEED, "lr=0.1", None)],
        r"No configuration is shown to be best; lowest eval loss: lr=0\.002, -0\.\d+ % "
        r"\(.*\) with 3 seeds; \d+ seeds would show \d+ %(.|\n)*lr=0\.1 diverged in 3 of 3",
    ),
    "10 both kinds": (
        rows(base=PLAIN, optimizer_muon=(93.0, 100, 1.88), optimizer_sgd=(108.0, 70, 2.24),
             optimizer_lion=(100.0, 90, 2.01)),
        [("best", LOSS, "muon", -6.0), ("beside", SPEED, "muon", 0.93),
         ("at_worse_loss", SPEED, "sgd", 1.08), ("beside", LOSS, "sgd", 12.0)],
        r"muon has the lowest eval loss: -6(\.\d)? % \(.*\) against adamw, at 0\.93x \(.*\) the "
        r"speed\.\nsgd is fastest, 1\.0\dx \(.*\), but its eval loss is higher: \+12 %",
    ),
    "11 repeats missing": (
        only(rows(base=PLAIN, optimizer_adafactor=(131.0, 75, 2.0), optimizer_lion=(50, 90, 2.0),
                  precision_bf16=(120, 90, 2.0)), 2, optimizer="lion"),
        [("best", SPEED, "adafactor", 1.31), ("missing", SPEED, "lion", 0.5)],
        r"adafactor is fastest of those with 3 repeats: 1\.3\dx(.|\n)*"
        r"Too few repeats to compare: lion \(2\); the same command measures 1 run, about [\d.]+ s",
    ),
    "11 a speed missing": (
        [replace(run, shared=True) if run.repeat == 2 and run.choices.get("optimizer") == "lion"
         else run for run in rows(base=PLAIN, optimizer_adafactor=(131.0, 75, 2.0),
                                  optimizer_lion=(50, 90, 2.0))],
        [("best", SPEED, "adafactor", 1.31), ("missing", SPEED, "lion", 0.5)],
        r"(.|\n)*lion \(2\); sweep\.repeats=4 and the same command measures 3 runs, about [\d.]+ s",
    ),
    "12 several groups": (
        [*rows(base=PLAIN, precision_bf16=(131.0, 62, 2.0)),
         Run({**OTHER, "precision": "fp32"}, speed=900.0)],
        [("best", SPEED, "bf16", 1.31), ("only_one", SPEED, "tiny_bert", None)],
        r"tiny \(6 runs\): bf16 is fastest: 1\.3\dx(.|\n)*"
        r"tiny_bert \(1 run\): nothing to compare with",
    ),
    "13 a tie at the top": (
        rows(base=PLAIN, precision_bf16=(131.0, 70, 2.0), optimizer_adafactor=(130.7, 55, 2.0),
             optimizer_lion=(90, 90, 2.0)),
        [("best", SPEED, "bf16", 1.31), ("peers", SPEED, "adafactor", 1.31)],
        r"bf16 and adafactor are fastest, tied: 1\.3\dx \(.*\) and 1\.3\dx the speed of .*; "
        r"adafactor needs the least memory of them, 0\.55x",
    ),
    "14 a noisy baseline": (
        [Run({"precision": "fp32"}, repeat=n, seed=n, speed=s) for n, s in enumerate((70, 133, 90))]
        + [Run({"memory": "checkpointing"}, repeat=n, seed=n, speed=100.0 + n, peak=58 * MIB)
           for n in range(3)],
        [("unquiet", SPEED, "memory=none", None), ("best", PEAK, "checkpointing", 0.58)],
        r"The machine was not quiet: .*'s own repeats differ by 1\.9x, so no speed is decided\.\n"
        r"checkpointing needs 0\.58x the memory",
    ),
    "15 one repeat": (
        rows(rounds=1, base=PLAIN, precision_bf16=(128.0, 100, 2.0)),
        [("few", SPEED, "bf16", 1.28)],
        r"One run each, so no difference in speed is shown; highest: bf16 with 1\.2\dx; "
        r"sweep\.repeats=3 and the same command measures 4 runs, about [\d.]+ s",
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=SETS)
def one(request, tmp_path_factory):
    runs, claims, words = SETS[request.param]
    return compared(tmp_path_factory.mktemp("set"), runs), claims, words


def test_verdict_has_expected_claims_and_first_sentence(one):
    found, claims, words = one
    told = [
        (claim["kind"], claim["measure"], row["configuration"], row.get("value"))
        for claim in as_plain(found)["claims"] for row in claim["rows"][:1]
    ]  # fmt: skip
    places = []
    for kind, measure, name, value in claims:
        named = [(n, each) for n, each in enumerate(told) if each[:2] == (kind, measure)]
        (place, (*_, its)), *_ = [found for found in named if found[1][2] == name]
        assert its == (None if value is None else pytest.approx(value, rel=0.02, abs=0.3))
        places.append(place)
    assert places == sorted(places), "in reading order"
    assert places[0] == 0
    assert re.match(words, "\n".join(verdict_lines(found)))
    assert all(len(line) <= 200 for line in verdict_lines(found))


def test_claims_state_their_certainty(one):
    found, *_ = one
    for claim in as_plain(found)["claims"]:
        for row in claim["rows"]:
            assert row["factors"].keys() == set(found.factors) or not found.factors
            if row.get("low") is not None:
                assert row["low"] <= row["value"] <= row["high"]
                assert 0 < row["level"] <= 0.05
    json.dumps(as_plain(found), allow_nan=False)


def test_every_format_has_the_same_sentences(one):
    found, *_ = one
    lines = verdict_lines(found)
    terminal = " ".join(render_terminal(found).split())
    page, markdown = render_page(found), render_markdown(found)
    published = dump(specification(found, WandbProject("team", "eke")))
    assert as_plain(found)["verdict"] == lines
    for line in lines:
        assert line in terminal
        assert escape(line) in markdown
        assert line in page.replace("&#39;", "'").replace("&#34;", '"')
        assert json.dumps(escape(line))[1:-1] in published


def test_undecided_auto_sweep_is_reported_as_open(tmp_path):
    """Its level stands in sweep.json: the row of 3 % is decided at 5 %, and not at 1.5 %."""
    noisy = (0.99, 1.025, 1.04, 1.05, 1.06)
    runs = [*repeated({"precision": "fp32"}, rounds=5), *repeated({"precision": "bf16"}, 200.0, 5),
            *[Run({"optimizer": "lion"}, repeat=n, speed=100 * e) for n, e in enumerate(noisy)],
            ]  # fmt: skip
    sweep = make_sweep(tmp_path, runs)
    paths = SweepPaths(sweep)
    content = json.loads(paths.sweep.read_text()) | {"repeats": {"level": 0.015, "rows": []}}
    paths.sweep.write_text(json.dumps(content))
    found = compare_runs([sweep])
    assert found.machines[0].level == 0.015
    (line,) = [line for line in verdict_lines(found) if "decided after" in line]
    assert re.match(r"1 of 2 decided after 5\.0 repeats; open: lion 1\.03x \(.*\), \d+ more", line)


def said(tmp_path, *variants, **options):
    return verdict_lines(compared(tmp_path, [run for v in variants for run in v], **options))


def test_proposed_repeat_command_is_valid(tmp_path):
    """`eke fit` refuses sweep.repeats, and runs typed alone have no command of a sweep."""
    for number, precision in enumerate(("fp32", "bf16")):
        make_run(tmp_path / "runs" / f"{number:016x}", Run({"precision": precision}))
    typed = verdict_lines(compare_runs([tmp_path / "runs"]))
    assert "python train.py -m with sweep.repeats=3" in typed[0]
    sweep = make_sweep(tmp_path, [Run({"precision": p}) for p in ("fp32", "bf16")])
    assert "sweep.repeats=3 and the same command" in verdict_lines(compare_runs([sweep]))[0]
    paths = SweepPaths(sweep)
    content = {**json.loads(paths.sweep.read_text()), "command": ["fit", "model=tiny"]}
    paths.sweep.write_text(json.dumps(content))
    assert "python train.py -m with sweep.repeats=3" in verdict_lines(compare_runs([sweep]))[0]


@pytest.mark.parametrize(
    ("choices", "keys", "rounds", "named"),
    [({"model": "tiny_gpt2"}, {}, 1, "tiny_gpt2"), ({}, {"data.seq_len": 16}, 3, "seq_len=16")],
    ids=["model, once", "length, thrice"],
)
def test_different_work_is_not_the_headline(choices, keys, rounds, named, tmp_path):
    """Runs of a folder need not have to do with each other: a smaller model is no technique."""
    other = repeated(choices, 900.0, rounds, peak=MIB, keys=keys)
    base = repeated({"precision": "fp32"}, rounds=rounds)
    faster = repeated({"precision": "bf16"}, 230.0, rounds)
    *told, last = said(tmp_path, base, other, faster)
    assert told
    assert not [line for line in told if named in line]
    assert "bf16" in told[0]
    assert last == f"{named} ({rounds} run{'s' * (rounds > 1)}): nothing to compare with."


def test_single_row_groups_share_one_line(tmp_path):
    lines = said(tmp_path, [Run({"model": "tiny"})], [Run({"model": "tiny_gpt2"}, speed=900.0)])
    assert lines == ["tiny (1 run), tiny_gpt2 (1 run): nothing to compare with."]


def lora_sweep():
    """Ranks and formats of LoRA, and one classifier of another model, in one folder."""
    lora = {"model": "llama_1b", "data": "chat", "peft": "lora"}
    runs = [
        Run({**lora, "precision": precision}, keys={"peft.r": r}, repeat=n, seed=n,
            speed=speed * (1 + n / 300), loss=1.5 * (1 + change), peak=r * MIB)
        for r, precision, speed, change3 in (
            (8, "fp32", 100.0, (0, 0, 0)), (16, "fp32", 97.0, (0.01, -0.01, 0.004)),
            (8, "bf16", 160.0, (-0.004, 0.008, 0.001)), (16, "bf16", 150.0, (0.01, -0.02, 0.0)))
        for n, change in enumerate(change3)
    ]  # fmt: skip
    other = {"model": "bert_base", "task": "sequence_classification", "data": "csv"}
    return [*runs, Run({**other, "precision": "bf16"}, speed=4000.0, peak=1)]


def test_two_experiments_have_short_group_names(tmp_path):
    found = compared(tmp_path, lora_sweep())
    lines = verdict_lines(found)
    assert lines[0].startswith("llama_1b (12 runs): bf16 is fastest: 1.60x")
    assert len(lines[0]) <= 200
    assert lines[-1] == "bert_base (1 run): nothing to compare with."
    lora, alone = found.machines
    assert set(lora.keys) == {"peft.r", "precision"}
    labels = [row.variant.label for row in lora.rows]
    assert labels == ["fp32 + r=8", "r=16", "bf16", "bf16 + r=16"]
    (row,) = alone.rows
    assert (row.variant.label, row.on_front, dict(row.ratios)) == ("bert_base", False, {})


def test_different_step_counts_are_stated_with_the_speed(tmp_path):
    longer = [Run(keys={"train.steps": 200}, steps=200, speed=120.0)]
    first = " ".join(said(tmp_path, [Run(keys={"train.steps": 100})], longer))
    assert "steps=200 with 1.20x" in first


def test_slower_row_leaves_others_undecided(tmp_path):
    first = said(tmp_path, repeated({"precision": "fp32"}), repeated({"precision": "fp16"}, 46.0),
                 repeated({"precision": "bf16"}, 100.1))[0]  # fmt: skip
    assert first.startswith("Nothing is shown to be faster than fp32")
    assert "; bf16 has 1.00x" in first


def undecided(choices, speed, spread=(0.8, 1.0, 1.25), **other):
    return [Run(choices, repeat=n, speed=speed * spread[n], **other) for n in range(3)]


def test_undecided_higher_loss_is_named_before_the_winner(tmp_path):
    first, above, peers = said(
        tmp_path, repeated({"precision": "fp32"}),
        undecided({"precision": "bf16"}, 208.0, (0.99, 1.01, 1.0)),
        undecided({"optimizer": "lion"}, 218.0, (0.6, 1.0, 1.6)),
        undecided({"optimizer": "sgd"}, 90.0, (1.01, 1.0, 0.99)),
        undecided({"optimizer": "adafactor"}, 205.0, (1.6, 0.6, 1.0)),
    )[:3]  # fmt: skip
    assert first.startswith("bf16 is fastest of those decided: 2.08x")
    assert above.startswith("Higher, but not decided: lion with 2.15x (")
    assert "adafactor" not in above
    assert peers == "Not distinguishable from it: lion, adafactor."


@pytest.mark.parametrize("kind", [repeated, undecided])
def test_faster_row_with_worse_loss_limits_the_verdict(tmp_path, kind):
    """It is no peer, and the winner is not called the fastest of all. So with least memory."""
    rows = (repeated({"precision": "fp32"}), repeated({"precision": "bf16"}, 200.0, peak=90 * MIB),
            repeated({"precision": "fp16"}, 110.0, peak=80 * MIB),
            kind({"optimizer": "lion"}, 400.0, loss=2.5, peak=50 * MIB))  # fmt: skip
    lines = said(tmp_path, *[[replace(r, seed=r.repeat) for r in row] for row in rows])
    assert lines[0].startswith("Fastest without a higher eval loss: bf16, 2.00x")
    assert any(
        line.startswith("Among those without a higher eval loss, fp16 needs 0.80x the memory")
        for line in lines
    )


def test_all_rows_of_least_memory_are_named(tmp_path):
    small = [repeated({"precision": p}, 80.0, peak=50 * MIB) for p in ("fp16", "bf16")]
    few = repeated({"precision": "tf32"}, 80.0, 2, peak=50 * MIB)
    lines = said(tmp_path, repeated({"precision": "fp32"}), *small, few)
    assert any(line.endswith(": bf16.") for line in lines), "tf32 was not tested"


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
def test_little_data_gives_a_short_verdict(tmp_path, runs, text):
    assert verdict_lines(compared(tmp_path, runs))[0].startswith(text)


def test_learning_rate_sweep_compares_no_speed(tmp_path):
    """A neighbour slowed one: that is a note on the machine, not an effect of a learning rate."""
    runs = [replace(run, speed=0.8 * run.speed) if run.keys["optimizer.lr"] == 0.002 else run
            for run in lrs(5.0, 4.7, 4.25)]  # fmt: skip
    found = compared(tmp_path, runs)
    assert [dict(row.ratios) for row in found.rows] == [{}, {}, {}]
    assert not any(row.on_front for row in found.rows)
    assert not found.machines[0].effects
    assert [row.variant.label for row in found.rows] == ["lr=0.003", "lr=0.002", "lr=0.001"]
    assert any(" differ by 0.8" in note for note in found.notes)


def test_long_sentence_is_split(tmp_path):
    keys = {"optimizer.beta1": 0.912345, "optimizer.beta2": 0.98765432, "optimizer.eps": 1.25e-7,
            "optimizer.weight_decay": 0.0123, "memory.every_n": 3}  # fmt: skip
    lines = said(
        tmp_path, repeated({"optimizer": "adafactor"}),
        repeated({"optimizer": "lion"}, 150.0, keys=keys, peak=90 * MIB, loss=2.0),
    )  # fmt: skip
    assert all(len(line) <= 200 for line in lines)
    assert lines[0].endswith(".")


@pytest.mark.parametrize("seeds", [1, 2])
def test_missing_seeds_are_counted_for_all_rows(tmp_path, seeds):
    """The baseline needs its seeds as well."""
    runs = [r for r in lrs(5.0, 4.9, 5.1) if r.repeat < seeds]
    (line,) = [line for line in said(tmp_path, runs) if "measures" in line]
    assert f"measures {3 * (3 - seeds)} runs" in line


def test_of_equal_losses_the_faster_row_is_named(tmp_path):
    """Formats of one training have its loss: the pair that wins in both is the winner."""
    made = [
        Run({"attention": a}, keys={"optimizer.lr": lr}, repeat=n, seed=n, speed=speed + n,
            loss=loss + 0.01 * n)
        for a, speed in (("sdpa", 100.0), ("eager", 150.0))
        for lr, loss in ((0.001, 2.0), (0.0001, 1.8)) for n in range(3)
    ]  # fmt: skip
    assert said(tmp_path, made)[0].startswith("eager + lr=0.0001 has the lowest eval loss: -10")


def test_a_sweep_until_decided_is_continued_by_its_command(tmp_path):
    sweep = make_sweep(tmp_path, rows(rounds=2, base=PLAIN, precision_bf16=(131.0, 62, 2.0)))
    paths = SweepPaths(sweep)
    content = json.loads(paths.sweep.read_text()) | {"command": ["-m", "sweep.repeats=auto"]}
    paths.sweep.write_text(json.dumps(content))
    lines = verdict_lines(compare_runs([sweep]))
    assert any("the same command continues the sweep" in line.lower() for line in lines)
    assert not any("sweep.repeats=3" in line for line in lines)


def test_a_tie_of_many_names_three(tmp_path):
    many = {f"memory_{n}": (131.0, 100, 2.0) for n in range(7)}
    first, *others = said(tmp_path, rows(OPEN, base=PLAIN, **many))
    assert " and 4 more " in first
    assert sum("not decided" in line for line in [first, *others]) <= 3


def test_the_same_speed_is_no_reason_to_choose_a_worse_loss(tmp_path):
    variants = {"optimizer_lion": (100.1, 100, 2.0), "optimizer_sgd": (100.2, 100, 2.4)}
    first = said(tmp_path, rows(base=PLAIN, **variants))[0]
    assert first.endswith(" sgd.")


def test_a_baseline_without_a_loss_is_named(tmp_path):
    runs = [replace(r, loss=math.nan) if r.keys["optimizer.lr"] == 0.001 else r for r in lrs(1, 2)]
    assert said(tmp_path, runs) == [
        "lr=0.001 has no loss to compare with; choose another --baseline."
    ]
    none = [replace(r, loss=None) for r in lrs(1, 2)]
    assert said(tmp_path / "none", none) == ["No comparable loss was measured."]
    equal = said(tmp_path / "equal", lrs(0.0, 0.0, 0.5), by="loss")
    assert equal[0].startswith(
        "No configuration is shown to be best; lowest eval loss: lr=0.001 and lr=0.002, equal"
    )
