"""`eke plan`: the forecast under the plan, what would make room, every known device."""

import json
import sys

import pytest

from eke import app
from eke.cli import main as cli
from eke.hardware import DEVICES, Device
from eke.record import PredictedMemory
from eke.units import GIB

WORK = ("data=synthetic", "data.num_samples=8192", "model.num_hidden_layers=6", "tracker=none")


@pytest.fixture(autouse=True)
def small_machine(monkeypatch, tmp_path):
    """A CPU with little memory, whatever this machine has."""
    cpu = Device(kind="cpu", name="test cpu", memory_bytes=2 * GIB)
    monkeypatch.setattr(sys.modules["eke.hardware.detect"], "detect", lambda: cpu)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def plan(capsys):
    """`eke plan` with arguments and without traces: exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli(["plan", "--quick", *WORK, *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def of_memory(text: str) -> list[str]:
    lines = text.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("memory: "))
    return lines[start:]


def test_the_verdict_comes_first(plan) -> None:
    code, out, _ = plan()
    assert code == 0
    lines = of_memory(out)
    assert lines[0].startswith("memory: fits ")
    assert "expected" in lines[1]
    assert "bytes per parameter: 4 weights + 4 gradients + 8 optimizer = 16" in out


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("batch.per_device=4096",),
        ("hardware=h100", "compile=inductor", "precision=fp8"),
        ("model=tiny_moe", "peft=lora", "hardware=rtx3090"),
        ("precision=bf16", "model=tiny_qwen3", "hardware=b200"),
    ],
)
def test_it_is_read_in_80_columns(plan, overrides) -> None:
    code, out, _ = plan(*overrides, "--why")
    assert code == 0
    assert not [line for line in of_memory(out) if len(line) > 80 and "http" not in line]


def test_what_does_not_fit_is_planned_all_the_same(plan) -> None:
    code, out, _ = plan("batch.per_device=4096")
    assert (code, "memory: does not fit" in out) == (0, True)
    code, out, _ = plan("model=llama2_7b")
    assert (code, "memory: does not fit" in out) == (0, True)


def test_why_proposes_what_can_be_typed(plan, capsys) -> None:
    code, out, _ = plan("batch.per_device=4096", "--why")
    assert code == 0
    assert "would make it fit, the cheapest first" in out
    after = out.partition("the cheapest first:")[2].splitlines()
    proposal = next(line.split() for line in after if line.startswith("  batch."))
    again, out, err = plan(*proposal)
    assert again == 0, err
    assert "memory: fits" in out


def test_json_has_the_fields_of_a_record(plan) -> None:
    code, out, _ = plan("--json", "--why", "batch.per_device=4096")
    assert code == 0
    memory = json.loads(out)["memory"]
    fields = dict(memory["predicted"])
    assert fields.pop("capacity") == 2 * GIB
    found = PredictedMemory(**fields)
    assert found.low < found.expected < found.high
    assert sum(found.components.values()) == found.expected
    assert found.verdict == "does not fit"
    assert memory["advice"]


def test_all_devices_in_one_table(plan) -> None:
    code, out, _ = plan("hardware=all")
    assert code == 0
    rows = {line.split()[0]: line for line in out.splitlines() if line.split()[:1]}
    assert set(DEVICES) <= set(rows)
    largest = [int(rows[option].split()[-1]) for option in ("t4", "a100_40", "a100_80", "b200")]
    assert largest == sorted(largest)
    assert max(map(len, out.splitlines())) <= 80


def test_a_device_that_lacks_a_format_is_refused_in_its_line(plan) -> None:
    code, out, _ = plan("hardware=all", "precision=bf16")
    assert code == 0
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.split()[:1]}
    assert rows["t4"][2] == "refused"
    assert rows["h100"][2] == "fits"
    assert "-> precision=fp16" in out
    assert max(map(len, out.splitlines())) <= 80
    _, out, _ = plan("hardware=all", "precision=bf16", "--json")
    refused = {row["hardware"] for row in json.loads(out) if row["memory"] is None}
    assert {"t4", "v100_16"} <= refused
    assert "h100" not in refused


def test_what_no_device_can_run_is_an_error(plan) -> None:
    code, _, err = plan("hardware=all", "model.num_attention_heads=7")
    assert code == 2
    assert "model.num_attention_heads" in err


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        (("hardware=all",), "plan_only=true"),
        (("-m", "hardware=all", "seed=0,1", "plan_only=true"), "hardware=h100"),
    ],
)
def test_all_devices_are_for_planning(arguments, fix, capsys) -> None:
    assert app.main([*WORK, *arguments]) == 2
    assert fix in capsys.readouterr().err


def test_a_run_that_cannot_fit_does_not_start(capsys, tmp_path) -> None:
    assert app.main([*WORK, "batch.per_device=4096"]) == 2
    err = capsys.readouterr().err
    assert "needs at least" in err
    assert "batch.accumulation=" in err
    assert "ignore_forecast=true" in err
    assert not list(tmp_path.iterdir()), "nothing was made"


def test_cells_that_cannot_fit_are_refused_in_the_plan_of_a_sweep(capsys) -> None:
    code = app.main(["-m", *WORK, "batch.per_device=8,4096", "plan_only=true"])
    out = capsys.readouterr().out
    assert code == 0
    assert "2 cells, 1 refused" in out
    assert "-> batch.per_device=" in out


def test_a_trace_of_the_very_builders(capsys, monkeypatch, tmp_path) -> None:
    """A real one, in a process of its own; asked again it is read from the disk."""
    monkeypatch.setattr(sys.modules["eke.forecast.cache"], "cache_folder", lambda: tmp_path)
    texts = []
    for _ in range(2):
        assert cli(["plan", *WORK, "batch.per_device=2"]) == 0
        texts.append(capsys.readouterr().out)
    assert "(traced)" in texts[0]
    assert texts[0] == texts[1]
    assert len(list(tmp_path.glob("traces/*.json"))) == 1
