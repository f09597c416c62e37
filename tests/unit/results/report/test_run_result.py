"""The end of a run on the screen: result first, cause of a failure, next command."""

import shlex

import pytest
from unit.plan.record.samples import bare_record, failed, full_record

from eke.common.paths import RunPaths
from eke.common.screen import plain, take_flags
from eke.config.compose import compose
from eke.plan.record import (
    MeasuredMemory,
    MemoryRecord,
    Outcome,
    PredictedMemory,
    PredictedStep,
    Throughput,
    Timing,
    write_record,
)
from eke.results.report.run_result import result_lines


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A run's folder with a model."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "0123456789abcdef"
    RunPaths(folder).model.mkdir(parents=True)
    return folder


@pytest.fixture
def flags():
    """Choose `-q` or `-v` for one test."""
    yield take_flags
    take_flags([])


def end(record, folder, columns: int = 80, **more) -> list[str]:
    write_record(RunPaths(folder), record)
    return [plain(line) for line in result_lines(record, folder, **more)]


ENDS = {
    "ok": full_record(),
    "ranks": full_record(
        memory=MemoryRecord(
            PredictedMemory(1, 2, 3, allocated_bytes=2**31),
            MeasuredMemory("b", 2**31, 2**32, peak_per_rank_bytes=[2**31] * 8),
        )
    ),
    "oom": failed("oom", "backward", "CUDA out of memory. Tried to allocate 2.00 GiB. " * 4),
    **{o: failed(o) for o in ("diverged", "crashed", "preempted", "cancelled", "timeout")},
}
ENDS["oom"].memory = MemoryRecord(
    PredictedMemory(2**30, 2**31, 2**32),
    MeasuredMemory(process_peak_bytes=2**31),
    ["batch.per_device=4 batch.accumulation=2"],
)


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
@pytest.mark.parametrize("name", ENDS)
def test_end_fits_the_screen(name, columns, folder, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = end(ENDS[name], folder)
    command = shlex.split(lines[-2])[:2] == ["python", "train.py"]
    assert max(map(len, lines[:-2] if command else lines)) <= columns
    assert len(lines) <= 24
    assert lines[0].startswith(f"{ENDS[name].outcome}  ")
    assert "eke show runs/0123456789abcdef" in lines[-1]
    assert ("it broke" in " ".join(lines)) == (name not in ("ok", "ranks", "oom"))


@pytest.mark.parametrize(
    ("choices", "command"),
    [
        ({"task": "causal_lm", "data": "python_source"}, ["generate", "def main"]),
        ({"task": "seq2seq_lm", "data": "csv"}, ["generate", "Hello"]),
        ({"task": "masked_lm"}, ["evaluate"]),
        ({"task": "sequence_classification"}, ["evaluate"]),
    ],
)
def test_next_command_depends_on_the_task(choices, command, folder) -> None:
    (line,) = [line for line in end(full_record(choices=choices), folder) if line[:5] == "next:"]
    verb, *prompt = command
    assert shlex.split(line)[1:] == ["eke", verb, "runs/0123456789abcdef", *prompt]


def test_run_without_model_is_reported_next(folder) -> None:
    RunPaths(folder).model.rmdir()
    text = "\n".join(end(full_record(choices={"task": "causal_lm"}), folder))
    assert "next: eke report runs/" in text
    assert "train.save_final=false" in text


def test_out_of_memory_proposes_the_command_that_needs_less(folder) -> None:
    record = ENDS["oom"]
    record.command = ["python", "train.py", "batch.per_device=8", "seed=1"]
    lines = end(record, folder)
    (line,) = [line for line in lines if line.startswith("next: ")]
    typed = shlex.split(line)[3:]
    assert typed == ["seed=1", *record.memory.advice[0].split()]
    assert compose(typed).config.batch.per_device == 4
    assert sum("batch.per_device=4" in line for line in lines) == 2


@pytest.mark.parametrize("outcome", ["preempted", "cancelled", "timeout"])
def test_interrupted_run_names_its_command(outcome, folder) -> None:
    record = failed(outcome)
    record.command = ["python", "train.py", "seed=1"]
    assert "next: python train.py seed=1" in end(record, folder)


def test_long_command_stands_alone(folder) -> None:
    record = failed("cancelled")
    record.command = ["python", "train.py", *(f"model.key_{n}=1" for n in range(20))]
    lines = end(record, folder)
    assert shlex.join(record.command) in lines
    assert "next:" in lines


def test_diverged_run_proposes_a_lower_rate(folder) -> None:
    record = failed("diverged")
    record.command, record.config = ["eke", "train", "optimizer.lr=1"], {"optimizer": {"lr": 1.0}}
    assert "next: eke train optimizer.lr=0.1" in end(record, folder)


@pytest.mark.parametrize(
    ("warmup", "reason"), [([0.1] * 3, "warm-up"), ([0.1], "changed")], ids=["few", "cuts"]
)
def test_missing_speed_has_a_reason(warmup, reason, folder) -> None:
    timing = Timing(train_s=3.0, warmup_steps_s=warmup)
    record = full_record(steps_done=3, timing=timing, throughput=Throughput())
    (line,) = [line for line in end(record, folder) if line.startswith("  speed ")]
    assert "not measured" in line
    assert reason in line


@pytest.mark.parametrize("shared", [False, True])
def test_forecast_error_is_shown_unless_the_device_was_shared(shared, folder) -> None:
    record = full_record(shared_device=shared)
    record.timing.predicted_step_s = PredictedStep(0.05, 0.08, 0.2)
    text = "\n".join(end(record, folder))
    assert ("(-20%)" in text) is not shared
    assert ("another process" in text) is shared


def test_recorded_run_has_its_date(folder) -> None:
    record = full_record(environment={"time": "2026-11-28T10:00:00+00:00"})
    lines = end(record, folder, recorded=True, note=" (it ran with tracker=none)")
    assert "(recorded 2026-11-28; rerun=true trains again)" in lines[0]
    assert "(it ran with tracker=none)" in lines


def test_quiet_end_is_one_line(folder, flags) -> None:
    flags(["-q"])
    (line,) = end(full_record(), folder)
    assert line.startswith("ok  ")
    assert "eval loss 2.5000" in line
    (line,) = end(failed("crashed"), folder)
    assert "it broke" in line


def test_verbose_end_has_every_figure(folder, flags) -> None:
    flags(["-v"])
    text = "\n".join(end(full_record(), folder))
    for word in ("warm-up", "model FLOP/s", "memory by stage", "computed in", "train loss"):
        assert word in text


def test_numbers_without_measurement_are_absent(folder) -> None:
    text = "\n".join(end(bare_record(), folder))
    assert "None" not in text
    assert "speed" not in text
    assert Outcome.ok.value in text
