"""What benchmarks do when something goes wrong: nothing that was measured is lost."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

BEFORE = dict(os.environ)

import fitting  # noqa: E402  # after the path is there
import memory_on_gpu  # noqa: E402  # after the path is there
import on_gpu  # noqa: E402  # after the path is there
import scaling_loops  # noqa: E402  # after the path is there
import techniques  # noqa: E402  # after the path is there

os.environ.clear()  # they set the number of threads for what they start
os.environ.update(BEFORE)

DEAF = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: None)
print("ready", flush=True)
while True:
    time.sleep(1)
"""


def test_a_run_that_hears_nothing_is_killed() -> None:
    process = subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    start = time.monotonic()
    techniques.end(process, patience_s=0.2)
    assert process.returncode == -9
    assert time.monotonic() - start < 10


def test_tests_that_ended_are_known_when_their_file_hangs(tmp_path, monkeypatch) -> None:
    file = tmp_path / "test_hanging.py"
    file.write_text(
        "import time, pytest\npytestmark = pytest.mark.gpu\n"
        "def test_one(): pass\n"
        "@pytest.mark.parametrize('n', ['a b'])\ndef test_two(n): assert False\n"
        "def test_three(): pytest.skip('why')\n"
        "def test_four(): time.sleep(600)\n"
    )
    monkeypatch.setattr(on_gpu, "one_test_at_most", list)
    part = on_gpu.Part("tests", "hanging", 20, on_gpu.run_tests, (str(file),))
    row = on_gpu.run_tests(part, 20)
    assert row["outcome"] == "timeout"
    assert [(case["name"], case["outcome"]) for case in row["tests"]] == [
        ("test_one", "passed"), ("test_two[a b]", "failed"), ("test_three", "skipped"),
    ]  # fmt: skip


def test_a_case_that_cannot_be_compared_does_not_end_the_others(monkeypatch) -> None:
    def compare(case, *_):
        if case.varies == "width":
            raise SystemExit("the loops computed different losses")
        return {"case": case.label, "outcome": "ok"}

    monkeypatch.setattr(scaling_loops, "compare", compare)
    states = list(scaling_loops.compare_loops("cpu", 10, 2, budget_s=60))
    outcomes = [row["outcome"] for row in states[-1]["loops"]]
    assert len(states) == len(outcomes) == 9, "one after each case"
    assert outcomes.count("ok") == 7
    assert outcomes.count("the loops computed different losses") == 2
    assert not list(scaling_loops.compare_loops("cpu", 10, 2, budget_s=-1))


def test_refused_cells_have_no_time(tmp_path) -> None:
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


def test_each_quarter_has_every_technique_and_all_have_every_format() -> None:
    each = memory_on_gpu.configurations(small=False)
    assert len(set(each)) == len(each) == 64
    for start in range(0, 64, 16):
        quarter = [" ".join(typed) for typed in each[start : start + 16]]
        for technique in memory_on_gpu.TECHNIQUES:
            assert sum(f" {technique} precision" in typed for typed in quarter) == 2, "both models"


@pytest.mark.parametrize("small", [False, True])
def test_both_models_take_turns(small) -> None:
    models = [typed[0] for typed in memory_on_gpu.configurations(small)]
    assert models[::2] == [models[0]] * (len(models) // 2)
    assert set(models[1::2]) == {models[1]} != {models[0]}
