"""What benchmarks do when something goes wrong: nothing that was measured is lost."""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

BEFORE = dict(os.environ)

import arguments  # noqa: E402  # after the path is there
import fitting  # noqa: E402  # after the path is there
import memory_on_gpu  # noqa: E402  # after the path is there
import on_gpu  # noqa: E402  # after the path is there
import recipes  # noqa: E402  # after the path is there
import report_power  # noqa: E402  # after the path is there
import scaling_loops  # noqa: E402  # after the path is there
import techniques  # noqa: E402  # after the path is there

from eke.common.errors import ConfigError, Problem  # noqa: E402  # after the path is there

os.environ.clear()  # they set the number of threads for what they start
os.environ.update(BEFORE)

DEAF = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: None)
print("ready", flush=True)
while True:
    time.sleep(1)
"""


def test_unresponsive_run_is_killed() -> None:
    process = subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    start = time.monotonic()
    techniques.end(process, patience_s=0.2)
    assert process.returncode == -9
    assert time.monotonic() - start < 10


@pytest.mark.slow
def test_finished_tests_are_known_after_a_kill(tmp_path) -> None:
    file = tmp_path / "test_killed.py"
    file.write_text(
        "import os, signal, pytest\npytestmark = pytest.mark.gpu\n"
        "def test_one(): pass\n"
        "@pytest.mark.parametrize('n', ['a b'])\ndef test_two(n): assert False\n"
        "def test_three(): pytest.skip('why')\n"
        "def test_four(): os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    part = on_gpu.Part("tests", "killed", 60, on_gpu.run_tests, (str(file),))
    row = on_gpu.run_tests(part, 60)
    assert row["outcome"] == "crashed"
    assert not on_gpu.is_done(row)
    assert [(case["name"], case["outcome"]) for case in row["tests"]] == [
        ("test_one", "passed"), ("test_two[a b]", "failed"), ("test_three", "skipped"),
    ]  # fmt: skip


def test_slow_script_is_killed_and_its_output_kept() -> None:
    done = on_gpu.spawn(["-uc", "import time; print('said'); time.sleep(600)"], 3)
    assert (done.code, done.out) == (None, "said\n")
    assert done.failure == {"outcome": "timeout"}


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (
            SystemExit("the loops computed different losses"),
            "the loops computed different losses",
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), "oom"),
        (RuntimeError("cuDNN has no engine\nfor it"), "cuDNN has no engine for it"),
        (ConfigError(Problem("batch.per_device", "4", "is too large")), "is too large"),
    ],
    ids=["different_losses", "out_of_memory", "library", "refused"],
)
def test_incomparable_case_does_not_end_the_others(error, outcome, monkeypatch) -> None:
    def compare(case, *_):
        if case.varies == "width":
            raise error
        return {"case": case.label, "outcome": "ok"}

    monkeypatch.setattr(scaling_loops, "compare", compare)
    monkeypatch.setattr(scaling_loops.gc, "collect", int)  # seconds each behind other tests
    states = list(scaling_loops.compare_loops("cpu", 10, 2, budget_s=60))
    outcomes = [row["outcome"] for row in states[-1]["loops"]]
    assert len(states) == len(outcomes) == 9, "one after each case"
    assert outcomes.count("ok") == 7
    assert sum(outcome in each for each in outcomes) == 2
    assert not list(scaling_loops.compare_loops("cpu", 10, 2, budget_s=-1))


def test_rejected_runs_have_no_time(tmp_path) -> None:
    sweep = tmp_path / "runs" / "sweep-1"
    sweep.mkdir(parents=True)
    cells = [
        {"folder": "", "overrides": ["attention=sdpa"]},
        {"folder": "runs/a", "overrides": ["attention=eager"]},
        {"folder": "runs/b", "overrides": ["kernels=none"]},
    ]
    (sweep / "sweep.json").write_text(json.dumps({"cells": cells}))
    for name, outcome in (("a", "ok"), ("b", "crashed")):
        (tmp_path / "runs" / name).mkdir()
        timing = {"steady_step_s": {"median": 0.5} if outcome == "ok" else None}
        record = {"outcome": outcome, "timing": timing}
        (tmp_path / "runs" / name / "record.json").write_text(json.dumps(record))
    assert fitting.step_times(tmp_path) == {fitting.key_of({"attention": "eager"}): 0.5}


def test_choice_is_ranked_among_measured_configurations(capsys) -> None:
    keys = [fitting.key_of({"batch.per_device": size}) for size in ("8", "4", "2")]
    measured = dict(zip(keys, (0.5, 0.4, 0.6), strict=True))
    row = fitting.rank(["batch.per_device=2"], [], measured)
    assert (row["rank"], row["configurations"]) == (3, 3)
    assert row["off_exhaustive_best"] == pytest.approx(0.5)
    assert row["typed_off"] == row["median_off"] == pytest.approx(0.25)
    absent = fitting.rank(["kernels=liger"], [], measured)
    assert absent["off_exhaustive_best"] is absent["rank"] is None
    assert absent["typed_off"] == pytest.approx(0.25)
    assert "not among what was measured" in capsys.readouterr().err
    poor = fitting.rank([], ["batch.per_device=2"], measured)
    assert (poor["rank"], poor["typed_off"]) == (2, pytest.approx(0.5))
    nothing = fitting.rank([], [], {})
    assert nothing["typed_off"] is nothing["median_off"] is None


def test_sweep_with_failed_runs_is_measured(tmp_path) -> None:
    failing = (str(tmp_path), "-c", "raise SystemExit(1)")
    fitting.run(*failing, fine=(0, 1))
    with pytest.raises(subprocess.CalledProcessError):
        fitting.run(*failing)


class Turns:
    """Turns of recipes.py that take so many seconds of a clock that stands still otherwise."""

    def __init__(self, monkeypatch, *took: float) -> None:
        self.took, self.now, self.limits = list(took), 0.0, []
        monkeypatch.setattr(recipes, "time", SimpleNamespace(monotonic=lambda: self.now))

    def turn(self, name: str, arguments: tuple[str, ...], limit_s: float) -> dict[str, float]:
        self.limits.append(limit_s)
        self.now += min(limit_s, self.took.pop(0))
        return {"samples_per_s": 1.0}

    def rounds(self, num_rounds: int, budget: float) -> int:
        rows = [("trainer", ()), ("fastest", ())]
        asked = argparse.Namespace(rounds=num_rounds, limit=180, budget=budget)
        played = list(recipes.play_rounds(self, rows, asked, self.now + budget))
        return len(played)


def test_round_that_does_not_fit_is_not_started(monkeypatch) -> None:
    assert Turns(monkeypatch, *[50.0] * 6).rounds(3, budget=450) == 3
    assert Turns(monkeypatch, 100, 100, 20, 20).rounds(3, budget=430) == 2


def test_first_round_ends_with_the_budget(monkeypatch) -> None:
    turns = Turns(monkeypatch, 500, 500)
    assert turns.rounds(3, budget=300) == 1
    assert turns.limits == [180, 120]


def test_run_that_failed_early_has_no_metrics(tmp_path) -> None:
    (tmp_path / "runs" / "a").mkdir(parents=True)
    record = {"outcome": "oom", "failure": {"message": "out of memory in forward"}}
    (tmp_path / "runs" / "a" / "record.json").write_text(json.dumps(record))
    found = recipes.read_run(on_gpu.Finished(1, "", ""), tmp_path)
    assert found == {"outcome": "oom", "reason": "out of memory in forward"}


def test_every_quarter_has_every_technique() -> None:
    each = memory_on_gpu.configurations(small=False)
    assert len(set(each)) == len(each) == 64
    for start in range(0, 64, 16):
        quarter = [" ".join(typed) for typed in each[start : start + 16]]
        for technique in memory_on_gpu.TECHNIQUES:
            assert sum(f" {technique} precision" in typed for typed in quarter) == 2, "both models"


@pytest.mark.parametrize("small", [False, True])
def test_both_models_are_measured_in_alternation(small) -> None:
    models = [typed[0] for typed in memory_on_gpu.configurations(small)]
    assert models[::2] == [models[0]] * (len(models) // 2)
    assert set(models[1::2]) == {models[1]} != {models[0]}


SCRIPTS = sorted(BENCHMARKS.glob("*.py"))


@pytest.mark.parametrize("place", ["file/out.json", "folder"])
def test_unwritable_output_is_reported_before_measuring(place, tmp_path, capsys) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(SystemExit) as ended:
        arguments.writable(argparse.ArgumentParser("bench"), tmp_path / place)
    assert ended.value.code == 2
    assert f"bench: error: {tmp_path / place} cannot be written: " in capsys.readouterr().err


def test_missing_output_folder_is_created_empty(tmp_path) -> None:
    file = tmp_path / "new" / "folder" / "out.json"
    assert arguments.writable(argparse.ArgumentParser(), file) == file
    assert list(file.parent.iterdir()) == []


@pytest.mark.parametrize("script", [s for s in SCRIPTS if "ArgumentParser" in s.read_text()],
                         ids=lambda script: script.stem)  # fmt: skip
def test_every_script_checks_its_output_path(script) -> None:
    text = script.read_text()
    writes = re.search(r'"(--out|--output|out)"', text) is not None
    assert writes == ("writable(parser, " in text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "typed", "said"),
    [
        ("reporting", ("--counts", "0"), "argument --counts: 0 is too few: 4 or more"),
        ("startup", ("--rounds", "1"), "argument --rounds: 1 is too few: 2 or more"),
        ("launching", ("--runs", "ten"), "argument --runs: ten is no whole number"),
        ("sweep_planning", ("--help",), "a file for what is printed"),
        ("tracker_cost", ("foo",), "argument option: invalid choice: 'foo'"),
    ],
)
def test_invalid_arguments_are_reported_without_a_traceback(script, typed, said, tmp_path) -> None:
    command = [sys.executable, str(BENCHMARKS / f"{script}.py"), *typed]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_1b", "bert_large"])
def test_manual_loop_trains_like_trainer(name, tmp_path) -> None:
    import plain_trainer as plain  # transformers' Trainer takes seconds
    import torch

    shape = plain.SHAPES[name, "small"]
    if name == "bert_large":  # whose dropout is drawn in another order
        none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        shape = replace(shape, sizes=shape.sizes | none)
    samples = plain.make_samples(shape, 320, 32)
    tensors = [{k: torch.as_tensor(v) for k, v in each.items()} for each in samples]
    torch.save(tensors, tmp_path / "samples.pt")
    work = plain.Work("fp32", 8, 2, lr=1e-2, samples=str(tmp_path / "samples.pt"))
    trainer, hand = plain.measure(shape, work), plain.measure(shape, replace(work, by_hand=True))
    assert hand["losses"] == pytest.approx(trainer["losses"], rel=1e-5)
    assert len(set(hand["losses"])) == 4
    assert hand["parameters"] == trainer["parameters"]


@pytest.mark.slow
def test_ranks_are_measured_in_each_phase(tmp_path, monkeypatch) -> None:
    """eke's own worker and both loops by hand, on two gloo ranks."""
    out = tmp_path / "sharding.json"
    typed = ["--size", "tiny", "--ranks", "2", "--ways", "former", "eke", "titan"]
    done = on_gpu.spawn(["benchmarks/sharding.py", *typed, "--out", str(out)], 240)
    assert done.code == 0, done.err
    content = json.loads(out.read_text())
    ways = content["ways"]

    def spawned(command, limit_s):  # with one of the ways, as the stage asks for
        Path(command[-1]).write_text(json.dumps({**content, "ways": {"titan": ways["titan"]}}))
        return done

    monkeypatch.setattr(on_gpu, "spawn", spawned)
    part = on_gpu.Part("ranks", "tiny", 240, on_gpu.run_ranks, ("--ways", "titan"))
    row = on_gpu.run_ranks(part, 240)
    assert (row["outcome"], row["ranks"]) == ("ok", 2)
    for way in ways.values():
        assert set(way["peaks"]) == {"load", "step", "evaluation", "save sync", "save async"}
        assert all(way["peaks"].values())
        # 4 bytes of each parameter are reduced: two tables and three layers.
        numbers = 2 * 499 * 64 + 3 * (4 * 64**2 + 3 * 64 * 128 + 2 * 64) + 64
        assert sum(size for kind, (_, size) in way["sent"].items() if "reduced" in kind) == (
            pytest.approx(4 * numbers, rel=0.02)
        )
    assert sum(size for kind, (_, size) in ways["former"]["sent"].items() if "gath" in kind) > (
        4 * numbers
    )


def test_page_has_the_table_of_simulated_errors() -> None:
    root = BENCHMARKS.parent
    record = json.loads((root / "results" / "report_power.json").read_text())
    lines = [report_power.Line(**each) for each in record["lines"]]
    assert {line.row for line in lines} == {row.__name__ for row in report_power.ROWS}
    assert not [line for line in lines if not line.is_right]
    page = (root / "notes" / "report_statistics.md").read_text()
    before, _, rest = page.partition(report_power.BEGIN)
    table, _, after = rest.partition(report_power.END)
    assert before
    assert after
    assert table.strip() == report_power.table(lines).strip()
