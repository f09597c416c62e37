"""Finished runs: what they say of the next one, and what becomes of broken files."""

import json
import math
import os
import threading
from dataclasses import replace
from random import Random

import pytest
from unit.estimate.time.cases import CPU, large, small

from eke.estimate.time import (
    StepTime,
    Unknown,
    forecast_time,
    num_runs,
    record_step_time,
    sum_line,
    time_history,
)
from eke.estimate.time.flops import Work
from eke.estimate.time.step_time import MIN_CALIBRATION_RUNS, fitted_rates
from eke.estimate.time.time_history import (
    Observation,
    amounts_of,
    calibrated_step_time,
    path_of,
    read_observations,
    time_group,
    work_key,
)
from eke.plan.planner.planner import outline_record
from eke.plan.record import Outcome, Record, Spread

TRUE = {"float32": 2e-11, "launches": 4e-6, "moved": 1e-10}
"""Seconds per FLOP, launch and byte of a made-up processor."""

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16)


def record_of(plan, seconds: float, **more) -> Record:
    record = outline_record(plan, [], 0, Outcome.ok, None)
    record.timing.steady_step_s = Spread(seconds, seconds, seconds, more.pop("n", 10))
    record.shared_device = more.pop("shared", None)
    return record


def seconds_of(plan, rates=TRUE) -> float:
    return sum(rates[kind] * amount for kind, amount in amounts_of(plan, Work(plan)).items())


def note_runs(count: int, noise: float = 0.0, device=CPU) -> None:
    rng = Random(1)
    for n in range(count):
        sizes = (f"batch.per_device={BATCHES[n % 8]}", f"model.num_hidden_layers={1 + n % 3}")
        plan = small(*sizes, f"data.seq_len={32 + 16 * (n % 5)}", device=device)
        record_step_time(plan, record_of(plan, seconds_of(plan) * math.exp(rng.gauss(0, noise))))


@pytest.mark.parametrize("count", [0, MIN_CALIBRATION_RUNS - 1])
def test_too_few_runs_give_no_cpu_estimate(count) -> None:
    note_runs(count)
    found = forecast_time(small(device=CPU))
    assert isinstance(found, Unknown)
    assert f"5 finished runs here are needed ({count} so far" in found.reason


def test_finished_runs_give_cpu_rates() -> None:
    note_runs(12)
    plan = small("batch.per_device=5", device=CPU)
    found = forecast_time(plan)
    assert found.step_s.expected == pytest.approx(seconds_of(plan), rel=1e-3)
    assert found.calibrated.runs == 12
    assert found.mfu is None
    assert found.basis == "finished runs on this device"


def test_noisy_runs_give_a_wide_range_that_holds_the_truth() -> None:
    note_runs(24, noise=0.2)
    plan = small("batch.per_device=5", device=CPU)
    found = forecast_time(plan)
    assert found.step_s.low < seconds_of(plan) < found.step_s.high
    assert found.step_s.high / found.step_s.low > 1.5


@pytest.mark.parametrize(
    ("noise", "typed", "words"),
    [(2.0, "batch.per_device=5", "differ by more than 10x"), (0.0, "precision=bf16", "bfloat16")],
    ids=["runs that contradict each other", "a format that never ran"],
)
def test_unsupported_configuration_has_no_estimate(noise, typed, words) -> None:
    note_runs(6, noise)
    found = forecast_time(small(typed, device=CPU))
    assert isinstance(found, Unknown)
    assert words in found.reason


@pytest.mark.parametrize(
    "typed",
    [
        "batch.per_device=64 model.num_hidden_layers=40",
        "model.num_hidden_layers=20",
        "data.seq_len=1024",
    ],
)
def test_extrapolation_far_beyond_runs_is_unknown(typed) -> None:
    """Rates that fit the runs best may leave FLOPs without any: 20 ms for 381 GFLOP."""
    note_runs(12)
    found = forecast_time(small(*typed.split(), device=CPU))
    assert isinstance(found, Unknown)
    assert "times the most in 12 finished runs here" in found.reason
    assert isinstance(forecast_time(small("batch.per_device=16", device=CPU)), StepTime)


def test_datasheet_is_not_corrected_far_beyond_the_runs() -> None:
    for n in range(6):
        plan = large(f"batch.per_device={BATCHES[n]}")
        record_step_time(plan, record_of(plan, 1.3 * calibrated_step_time(plan).step_s.expected))
    near, far = large("batch.per_device=30"), large("batch.per_device=40")
    assert num_runs(forecast_time(near)) == 6
    found = forecast_time(far)
    assert found.step_s == calibrated_step_time(far).step_s
    assert num_runs(found) == 0
    assert any("5 times the most in 6 finished runs" in note for note in found.notes)


def test_tables_match_the_estimates_of_plans() -> None:
    for n in range(6):
        plan = large(f"batch.per_device={BATCHES[n]}")
        record_step_time(plan, record_of(plan, 1.3 * calibrated_step_time(plan).step_s.expected))
    note_runs(12)
    rows = [forecast_time(large("batch.per_device=40")), forecast_time(large()),
            forecast_time(small("batch.per_device=64", device=CPU))]  # fmt: skip
    assert "1 run: not corrected: its" in " ".join(sum_line(rows, "cuda").split())
    assert "without an estimate: 1 run: its" in " ".join(sum_line(rows, "cuda").split())


def test_finished_runs_correct_a_datasheet() -> None:
    for n in range(6):
        plan = large(f"batch.per_device={BATCHES[n]}")
        prior = calibrated_step_time(plan)
        record_step_time(plan, record_of(plan, 1.3 * prior.step_s.expected))
    plan = large("batch.per_device=5")
    prior, found = calibrated_step_time(plan), forecast_time(plan)
    assert found.step_s.expected == pytest.approx(1.3 * prior.step_s.expected, rel=0.01)
    assert found.step_s.high / found.step_s.low < prior.step_s.high / prior.step_s.low
    assert found.samples_per_s.expected == pytest.approx(5 / found.step_s.expected)
    assert found.calibrated.factor == pytest.approx(1.3, rel=0.01)


def test_repeated_configuration_is_one_observation() -> None:
    plan = small(device=CPU)
    for seconds in (1.0, 2.0, 3.0):
        record_step_time(plan, replace(record_of(plan, seconds), run_id=f"run{seconds}"))
    found = read_observations(time_group(plan))
    assert [each.measured for each in found] == [3.0]


@pytest.mark.parametrize("broken", [{"shared": True}, {"n": 2}], ids=str)
def test_invalid_timings_are_not_recorded(broken) -> None:
    plan = small(device=CPU)
    record_step_time(plan, record_of(plan, 1.0, **broken))
    failed = record_of(plan, 1.0)
    failed.outcome = Outcome.crashed.value
    record_step_time(plan, failed)
    former = record_of(plan, 1.0)
    former.timing.clock = None
    record_step_time(plan, former)
    assert read_observations(time_group(plan)) == ()


def test_broken_history_lines_are_skipped() -> None:
    note_runs(6)
    plan = small(device=CPU)
    path = path_of(time_group(plan))
    good = path.read_text()
    first = json.loads(good.splitlines()[0])
    bad = [
        "not json", "[]", "{}", json.dumps(first | {"measured": -1}),
        json.dumps(first | {"measured": "nan"}), json.dumps(first | {"amounts": [1]}),
        json.dumps(first | {"measured": 1e400}), json.dumps(first | {"measured": 0}),
        json.dumps(first | {"predicted": 1e-9}), json.dumps(first | {"key": ""}), "{" * 5000,
    ]  # fmt: skip
    path.write_text("\n".join([*bad, good]))
    assert len(read_observations(time_group(plan))) == 6


def test_work_key_differs_with_step_time() -> None:
    plan = large()
    same = large("seed=7", "optimizer.lr=0.5")
    assert work_key(plan) == work_key(same)
    for other in (large("precision=tf32"), large("batch.per_device=5"), large("data.seq_len=64")):
        assert work_key(plan) != work_key(other)


def test_rates_are_never_negative() -> None:
    rng = Random(3)
    runs = tuple(
        Observation(
            f"key{n}", f"run{n}",
            {"float32": rng.uniform(1e6, 1e9), "launches": rng.uniform(10, 1e3),
             "moved": rng.uniform(1e5, 1e8)},
            0.0, rng.uniform(0.01, 1.0),
        )
        for n in range(12)
    )  # fmt: skip
    seconds, _ = fitted_rates(runs)
    assert all(each >= 0 for each in seconds.values())
    assert any(seconds.values())


def test_torn_history_line_does_not_affect_others() -> None:
    plan = small(device=CPU)
    note_runs(2)
    path = path_of(time_group(plan))
    path.write_bytes(path.read_bytes()[:-20])
    record_step_time(small("batch.per_device=5", device=CPU), record_of(plan, 1.0))
    assert len(read_observations(time_group(plan))) == 2


@pytest.mark.parametrize("kind", ["folder", "pipe", "unreadable", "binary", "enormous", "file"])
def test_invalid_history_file_is_ignored(kind) -> None:
    plan = small(device=CPU)
    path = path_of(time_group(plan))
    if kind == "file":  # where the folder should be
        path.parent.write_text("")
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
    assert read_observations(time_group(plan)) == ()
    assert isinstance(forecast_time(plan), Unknown)
    record_step_time(plan, record_of(plan, 1.0))  # may or may not be kept; says nothing


def test_history_files_have_a_size_limit(monkeypatch) -> None:
    monkeypatch.setattr(time_history, "KEPT_LINES", 10)
    plan = small(device=CPU)
    path = path_of(time_group(plan))
    for number in range(55):
        record_step_time(plan, replace(record_of(plan, 1.0), run_id=f"run{number}"))
    assert len(path.read_text().splitlines()) <= 20
    assert read_observations(time_group(plan))[-1].run_id == "run54"


def test_concurrent_runs_keep_all_history_lines() -> None:
    plan = small(device=CPU)
    path = path_of(time_group(plan))

    def many(who: int) -> None:
        for number in range(20):
            time_history.add_line(path, f"{who}-{number}")

    threads = [threading.Thread(target=many, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(path.read_text().split())) == 80
