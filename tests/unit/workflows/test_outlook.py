"""A sweep that is only planned: what each of its cells is expected to take."""

import json
import re
import sys

import pytest

from eke import workflows
from eke.cli import main as cli
from eke.common.paths import RunPaths
from eke.common.text import GIB
from eke.config.compose import compose
from eke.estimate.memory import trace_client
from eke.hardware import Device
from eke.plan.planner import outline_record
from eke.plan.record import Outcome, PredictedMemory, write_record
from eke.workflows.planning import plan_for

WORK = ("data=synthetic", "data.num_samples=200000", "model.num_hidden_layers=6", "tracker=none")
ON_GPU = ("hardware=a100_80", "batch.per_device=8,100000")


@pytest.fixture(autouse=True)
def small_machine(monkeypatch, tmp_path):
    """A CPU with little memory, and caches of the test's own."""
    cpu = Device(kind="cpu", name="test cpu", memory_bytes=2 * GIB)
    monkeypatch.setattr(sys.modules["eke.hardware.cpu"], "detect", lambda: cpu)
    monkeypatch.setattr(
        sys.modules["eke.estimate.memory.trace_client"], "cache_folder", lambda: tmp_path
    )
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def traces(monkeypatch):
    """Numbers of plans that traces were asked for; there are none."""
    asked: list[int] = []

    def trace_all(plans, progress, processes):
        asked.append(len(plans))
        return [trace_client.TraceResult(None, "not here") for _ in plans]

    monkeypatch.setattr(trace_client, "trace_all", trace_all)
    return asked


def table_of(text: str) -> list[list[str]]:
    """Cells of the rows, the head first."""
    lines = text.partition("\n\n")[2].partition("\n\n")[0].splitlines()
    return [re.split(r" {2,}", line.strip()) for line in lines]


@pytest.mark.slow
def test_each_run_has_a_memory_and_time_forecast(capsys) -> None:
    assert cli(["plan", "--quick", "-m", *WORK, *ON_GPU, "seed=1,2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("2 runs fit, 2 rejected  at most ")
    head, *rows = table_of(out)
    assert head == ["verdict", "batch.per_device", "seed", "memory", "step", "samples/s"]
    assert [row[0] for row in rows] == ["fits", "fits", "rejected", "rejected"]
    for _, size, _, memory, step, rate in rows[:2]:
        assert memory.endswith("iB")
        assert step.endswith("s")
        assert " to " in rate
        assert size == "8"
    assert "  rejected  batch.per_device=100000 seed=1 and 1 other\n" in out
    assert "0 traced, 2 by formulas\n" in out
    assert "0 of 2 calibrated" in out


SWEEPS = {
    "one fits": (("batch.per_device=8",), "1 run fits  "),
    "all fit": (("batch.per_device=4,8",), "2 runs fit  at most "),
    "mixed": (("batch.per_device=8,100000",), "1 run fits, 1 rejected  "),
    "all rejected": (("batch.per_device=100000,200000",), "2 runs rejected\n"),
    "on one device": (
        ("hardware=t4,h100", "precision=bf16_pure,fp32", "model=llama_1b", "batch.per_device=12"),
        "2 runs fit, 2 rejected  at most ",
    ),
}


@pytest.mark.parametrize(
    ("columns", "name"), [(60, name) for name in SWEEPS] + [(n, "mixed") for n in (80, 120, 200)]
)
def test_forecast_of_a_sweep_begins_with_its_verdict(columns, name, capsys, monkeypatch) -> None:
    typed, first = SWEEPS[name]
    monkeypatch.setenv("COLUMNS", str(columns))
    command = ["plan", "--quick", "-m", "tracker=none", "hardware=a100_80", *typed]
    assert cli(command) == 0
    out = capsys.readouterr().out
    assert out.startswith(first)
    lines = out.splitlines()
    assert all(len(line) <= columns or len(line.split()) == 1 for line in lines)
    assert cli([*command, "-q"]) == 0
    assert out.startswith(capsys.readouterr().out.rstrip())


def test_each_device_of_a_sweep_has_its_own_forecast(capsys) -> None:
    typed = ["plan", "--quick", "-m", *WORK, "batch.per_device=1000", "hardware=t4,h100"]
    assert cli([*typed, "--json"]) == 0
    small, large = (each["memory"]["predicted"] for each in json.loads(capsys.readouterr().out))
    assert small["capacity"] < large["capacity"]


def test_auto_repeats_have_minimum_expected_and_maximum_hours(capsys) -> None:
    typed = ["plan", "--quick", "-m", *WORK, ON_GPU[0], "precision=bf16,fp32", "sweep.repeats=auto"]
    assert cli(typed) == 0
    out = capsys.readouterr().out
    assert len(table_of(out)) == 3, "the first round"
    pattern = r"(\w+): (\d+) repeats, (\d+) runs; GPU-hours \(estimate\): about (\S+) "
    found = [(name, int(n), int(runs)) for name, n, runs, _ in re.findall(pattern, out)]
    assert found == [("least", 3, 6), ("expected", 5, 10), ("most", 10, 20)]
    hours = [float(each[-1]) for each in re.findall(pattern, out)]
    assert hours[2] == pytest.approx(2 * hours[1], rel=0.1)
    assert cli([*typed, "sweep.max_repeats=4", "--json"]) == 0
    cells = json.loads(capsys.readouterr().out)
    assert [each["repeats"] for each in cells] == [{"least": 3, "expected": 4, "most": 4}] * 2


def test_cpu_without_runs_has_no_step_time(capsys) -> None:
    assert workflows.main(["-m", *WORK, "seed=1,2", "plan_only=true"]) == 0
    out = capsys.readouterr().out
    _, *rows = table_of(out)
    assert [row[0] for row in rows] == ["fits", "fits"]
    assert "estimates, " not in out
    assert "samples/s" not in out
    assert ": 2 runs" in out


def test_json_uses_record_paths(capsys) -> None:
    assert cli(["plan", "--quick", "--json", "-m", *WORK, *ON_GPU]) == 0
    fits, refused = json.loads(capsys.readouterr().out)
    fields = dict(fits["memory"]["predicted"])
    assert fields.pop("capacity") > 0
    assert PredictedMemory(**fields).verdict == "fits"
    assert fits["timing"]["predicted_step_s"]["expected"] > 0
    assert "batch.per_device=8" in fits["overrides"]
    assert fits["run_id"]
    assert refused["outcome"] == "refused"
    assert refused["rule"] == "does_not_fit"
    assert "memory" not in refused


@pytest.mark.parametrize(
    ("arguments", "count"), [((), [1]), (("--quick",), [])], ids=["eke plan", "quick"]
)
def test_runs_are_traced_unless_quick(arguments, count, traces, capsys) -> None:
    """128 samples take 1.5 of 2 GiB by formulas, that lie between 0.9 and 2.1."""
    typed = ("batch.per_device=8,140", "seed=1")
    assert cli(["plan", *arguments, "-m", *WORK, *typed]) == 0
    assert traces == count


@pytest.mark.slow
@pytest.mark.parametrize("torch", ["", "older"], ids=["same", "another torch"])
def test_plan_lists_finished_and_outdated_runs(torch, capsys, tmp_path) -> None:
    typed = ["-m", *WORK, "plan_only=true", "seed=1,2,3"]
    composed = compose((*WORK, "seed=2"), in_sweep=True)
    plan = plan_for(composed, planning=True)
    paths = RunPaths(tmp_path / "runs" / plan.run_id)
    paths.folder.mkdir(parents=True)
    record = outline_record(plan, [], 0, Outcome.ok, None)
    now = record.machine["torch"]
    record.machine["torch"] = torch or now
    write_record(paths, record)
    assert workflows.main(typed) == 0
    told = capsys.readouterr().out
    assert (": 1 finished run" in told) is (not torch)
    again = f"repeated in a new folder: 1 run (torch: older -> {now}). eke report"
    assert (again in told) is bool(torch)
    assert cli(["plan", "--quick", "--json", *typed]) == 0
    first, second, _ = json.loads(capsys.readouterr().out)
    assert not {"answered_by", "done_again"} & first.keys()
    assert second.get("answered_by") == (None if torch else f"runs/{plan.run_id}")
    assert second.get("done_again") == ([f"torch: older -> {now}"] if torch else None)
