"""Pairs on disk: what is written of a run, what is read, and what a hostile file can do."""

import json
import os
import threading
from dataclasses import replace
from functools import cache

import pytest
from unit.plan.cases import GPU, SYNTHETIC, plan_of

from eke.estimate.memory import (
    calibration,
    forecast,
    forecast_line,
    known_forecast,
    note_pair,
    render_forecast,
)
from eke.estimate.memory.calibration import FOLDER, memory_group, pair_of, path_of, read_pairs
from eke.estimate.memory.predict_memory import with_room
from eke.estimate.memory.render_memory import as_json, note_forecast
from eke.plan.planner import outline_record
from eke.plan.record import MeasuredMemory, Outcome

BATCHES = (1, 2, 3, 4, 5, 6, 7)


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path / "pairs"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "pairs"


@cache
def plan(batch: int, *overrides: str, **named):
    return plan_of(*SYNTHETIC, f"batch.per_device={batch}", *overrides, **named)


def record_of(made, ratio: float = 1.1, outcome: Outcome = Outcome.ok, run_id: str = ""):
    """What a run of this plan would leave, had it measured so many times what was forecast."""
    record = outline_record(made, [], 0, outcome, None)
    record.run_id = run_id or record.run_id
    note_forecast(record, made)
    expected = forecast(made)
    record.memory.measured = MeasuredMemory(
        peak_allocated_bytes=round(ratio * expected.allocated.expected),
        peak_reserved_bytes=round(ratio * expected.peak.expected),
    )
    return record


def finish(*batches: int, ratio: float = 1.1) -> None:
    """Runs that measured so many times what was forecast."""
    for batch in batches:
        note_pair(plan(batch), record_of(plan(batch), ratio))


def group():
    return memory_group(plan(1), "closed_form")


def test_from_enough_runs_on_a_plan_says_what_corrected_it() -> None:
    finish(1, 2)
    few = render_forecast(plan(9), known_forecast(plan(9)))
    assert "not calibrated: 2 runs on this device (5 needed)" in " ".join(few.split())
    finish(3, 4, 5, 6)
    found = known_forecast(plan(9))
    text = " ".join(render_forecast(plan(9), found).split())
    assert "calibrated by 6 runs on this device (torch" in text
    assert "expected x 1.1, within +-" in text
    assert found.best.expected == pytest.approx(1.1 * found.peak.expected, rel=1e-4)
    assert found.best.low == found.peak.low == forecast(plan(9)).peak.low
    assert "expected" in forecast_line(plan(9))


def test_records_keep_the_prediction_as_it_was_and_feed_on_nothing_else() -> None:
    finish(*BATCHES)
    record = record_of(plan(9))
    predicted = record.memory.predicted
    assert predicted is not None
    assert predicted.allocated_bytes == forecast(plan(9)).allocated.expected
    assert predicted.expected == forecast(plan(9)).peak.expected
    assert predicted.calibrated is not None
    assert predicted.calibrated.runs == len(BATCHES)
    assert predicted.calibrated.allocated_bytes == pytest.approx(
        1.1 * predicted.allocated_bytes, rel=1e-4
    )
    pair = pair_of(plan(9), record)
    assert pair is not None
    assert pair.predicted == predicted.allocated_bytes
    for _ in range(3):  # the more runs, the same correction: it does not add up
        finish(*BATCHES)
        assert known_forecast(plan(9)).best.expected == pytest.approx(
            1.1 * predicted.expected, rel=1e-4
        )


def test_json_says_how_many_runs_there_were() -> None:
    finish(1)
    found = as_json(known_forecast(plan(9)))["predicted"]["calibrated"]
    assert (found["runs"], found["needed"], found["expected"]) == (1, 5, None)
    finish(*BATCHES)
    found = as_json(known_forecast(plan(9)))["predicted"]["calibrated"]
    assert found["factor"] == pytest.approx(1.1, rel=1e-4)
    assert found["low"] == forecast(plan(9)).peak.low
    assert json.dumps(found)


def test_repeating_one_run_is_no_evidence() -> None:
    made = plan(1)
    for number in range(10):
        again = plan(1, f"seed={number % 2}")  # what takes no memory makes no other configuration
        note_pair(again, record_of(again, run_id=f"run{number}"))
    assert len(read_pairs(memory_group(made, "closed_form"))) == 10
    found = known_forecast(plan(9)).calibrated
    assert found is not None
    assert (found.num_runs, found.peak) == (1, None)


@pytest.mark.parametrize(
    "change",
    [
        lambda record: setattr(record, "outcome", Outcome.crashed.value),
        lambda record: setattr(record.memory, "measured", None),
        lambda record: setattr(record.memory.measured, "peak_allocated_bytes", None),
        lambda record: setattr(record.memory.measured, "peak_allocated_bytes", 10**15),
        lambda record: setattr(record.memory, "predicted", None),
        lambda record: record.effective.update(skipped_steps=1),
    ],
    ids=["crashed", "no_memory", "no_peak", "nonsense", "no_prediction", "skipped_steps"],
)
def test_a_run_that_measured_nothing_comparable_adds_nothing(change, apart) -> None:
    record = record_of(plan(1))
    change(record)
    note_pair(plan(1), record)
    assert not apart.exists()


def test_on_a_gpu_reserved_memory_and_the_context_are_compared() -> None:
    made = plan(1, device=GPU)
    record = record_of(made)
    assert record.memory.predicted is not None
    assert record.memory.measured is not None
    pair = pair_of(made, record)
    assert pair is not None
    assert pair.predicted == record.memory.predicted.expected
    context = record.memory.predicted.components["context"]
    assert pair.measured == record.memory.measured.peak_reserved_bytes + context
    record.memory.measured.peak_reserved_bytes = None
    assert pair_of(made, record) is None


def test_another_device_library_method_or_doubt_is_another_group(monkeypatch) -> None:
    one = path_of(group())
    assert path_of(memory_group(plan(2), "closed_form")) == one
    others = [
        memory_group(plan(1), "trace"),
        memory_group(plan(1, device=GPU), "closed_form"),
        memory_group(plan(1, "peft=lora"), "closed_form"),
        memory_group(plan(1, "distributed=ddp", "distributed.num_processes=2"), "closed_form"),
        {**group(), "torch": "0.1"},
        {**group(), "formulas": "changed"},
    ]
    assert len({one, *map(path_of, others)}) == 1 + len(others)


HOSTILE = [
    "", "{", "[]", "null", "12", "\x00\x01", "[" * 100_000, '{"key": 1}',
    '{"key": "k", "run_id": "r", "predicted": 0, "measured": 5}',
    '{"key": "k", "run_id": "r", "predicted": 1e999, "measured": 5}',
    '{"key": "k", "run_id": "r", "predicted": NaN, "measured": 5}',
    '{"key": "k", "run_id": "r", "predicted": true, "measured": true}',
    '{"key": ["k"], "run_id": {}, "predicted": 5, "measured": 5}',
    '{"key": "k", "run_id": "r", "predicted": 5, "measured": 99999999999999999999999}',
    '{"key": "k", "run_id": "r", "predicted": "5", "measured": "5"}',
]  # fmt: skip


@pytest.mark.parametrize("line", HOSTILE, ids=range(len(HOSTILE)))
def test_torn_and_hostile_lines_are_passed_over(line) -> None:
    finish(1, 2, 3)
    with open(path_of(group()), "a") as file:
        file.write(line + "\n")
    finish(4)
    assert len(read_pairs(group())) == 4
    assert known_forecast(plan(9)).calibrated.num_runs == 4


def test_a_line_that_a_kill_has_cut_costs_no_other() -> None:
    finish(1, 2)
    path = path_of(group())
    path.write_bytes(path.read_bytes()[:-20])
    finish(3, 4)
    assert len(read_pairs(group())) == 3


@pytest.mark.parametrize("kind", ["folder", "pipe", "unreadable", "binary", "enormous", "file"])
def test_what_is_no_file_of_pairs_is_no_trouble(kind, apart) -> None:
    path = path_of(group())
    if kind == "file":  # where the folder should be
        apart.write_text("")
    else:
        path.parent.mkdir(parents=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "binary":
        path.write_bytes(os.urandom(5000))
    elif kind == "enormous":
        with open(path, "wb") as file:
            file.truncate(2**33)
    elif kind == "unreadable":
        path.symlink_to(path)
    found = known_forecast(plan(9))
    assert found.calibrated is not None
    assert found.calibrated.num_runs == 0
    if kind != "pipe":
        finish(1)  # may or may not be kept; says nothing


def test_files_do_not_grow_without_end(apart, monkeypatch) -> None:
    monkeypatch.setattr(calibration, "KEPT_LINES", 10)
    made, record = plan(1), record_of(plan(1))
    for number in range(55):
        note_pair(made, replace(record, run_id=f"run{number}"))
    lines = path_of(group()).read_text().splitlines()
    assert len(lines) <= 20
    assert read_pairs(group())[-1].run_id == "run54"
    monkeypatch.setattr(calibration, "KEPT_FILES", 3)
    for number in range(6):
        (apart / f"{number}.jsonl").write_text("")
        os.utime(apart / f"{number}.jsonl", (number, number))
    note_pair(made, record)
    assert len(list(apart.glob("*.jsonl"))) == 3
    assert path_of(group()).exists()


def test_runs_beside_each_other_lose_nothing() -> None:
    made, record = plan(1), record_of(plan(1))

    def many(who: int) -> None:
        for number in range(20):
            note_pair(made, replace(record, run_id=f"{who}-{number}"))

    threads = [threading.Thread(target=many, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_pairs(group())) == 80


def test_a_correction_refuses_nothing_and_changes_the_verdict() -> None:
    found = known_forecast(plan(9))
    capacity = int(1.05 * found.peak.expected)
    small = with_room(plan(9), capacity).device
    assert known_forecast(plan(9, device=small)).verdict.value == "tight"
    finish(*BATCHES, ratio=1.2)
    after = known_forecast(plan(9, device=small))
    assert after.verdict.value == "does not fit"
    assert after.best.low == found.peak.low < capacity
