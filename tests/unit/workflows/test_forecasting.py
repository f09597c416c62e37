"""`eke plan`: the forecast under the plan, what would make room, every known device."""

import json
import sys

import pytest

from eke import workflows
from eke.cli import main as cli
from eke.common.text import GIB
from eke.estimate.memory import Traced, trace_client
from eke.estimate.memory.predict_memory import PYTHON_BYTES
from eke.hardware import DEVICES, Device
from eke.plan.record import PredictedMemory

WORK = ("data=synthetic", "data.num_samples=8192", "model.num_hidden_layers=6", "tracker=none")


@pytest.fixture(autouse=True)
def small_machine(monkeypatch, tmp_path):
    """A CPU with little memory, whatever this machine has."""
    cpu = Device(kind="cpu", name="test cpu", memory_bytes=2 * GIB)
    monkeypatch.setattr(sys.modules["eke.hardware.cpu"], "detect", lambda: cpu)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def plan(capsys):
    """`eke plan` with arguments and without traces: exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli(["plan", "--quick", *WORK, *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_memory_verdict_is_printed_first(plan) -> None:
    code, out, _ = plan()
    assert code == 0
    first = out.splitlines()[0]
    assert first.startswith("fits  ")
    assert "expected" in first
    assert "--json" in out.splitlines()[-1]
    assert "learning rate" not in out, "derived settings are details"


def test_verbose_plan_shows_every_setting(plan) -> None:
    code, out, _ = plan("-v")
    assert code == 0
    assert out.startswith("fits  ")
    for word in ("8 optimizer = 16", "learning rate", "need less memory", "tensors by phase"):
        assert word in out


def test_quiet_plan_is_the_verdict(plan) -> None:
    code, out, _ = plan("-q", "hardware=v100_16", "batch.per_device=4096")
    assert code == 0
    assert out.startswith("does not fit  ")
    assert len(out.splitlines()) <= 2


@pytest.mark.parametrize(
    "overrides",
    [("batch=auto",), ("recipe=low_memory", "hardware=h100"), ("data.seq_len=32", "train.steps=1")],
    ids=["a batch size", "a recipe", "a warning"],
)
def test_choices_and_warnings_are_always_shown(overrides, plan) -> None:
    made = json.loads(plan(*overrides, "--json")[1])
    shown = [
        line for line in plan(*overrides)[1].splitlines() if line[:7] in ("chosen ", "warning")
    ]
    chosen = [each for each in made["decisions"] if "recipe=" in each["reason"]]
    chosen += [each for each in made["decisions"] if each["reason"].startswith("auto: ")]
    for each in chosen:
        assert any(line.split()[1].startswith(f"{each['key'].split()[0]}") for line in shown)
    assert len(shown) >= len(chosen) + len(made["warnings"]) > 0


@pytest.mark.parametrize(
    "overrides",
    [
        ("batch.per_device=4096",),
        ("hardware=h100", "compile=inductor", "precision=fp8"),
        ("model=tiny_moe", "peft=lora", "hardware=rtx3090"),
        ("peft=lora",),
    ],
)
@pytest.mark.parametrize("columns", [60, 80, 200])
@pytest.mark.parametrize("flag", ["--why", "-v"])
def test_plan_fits_the_screen(plan, overrides, columns, flag, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = plan(*overrides, flag)
    assert code == 0
    long = [line for line in out.splitlines() if len(line) > columns and "http" not in line]
    lists = [words for line in long if len(words := line.split()) > 1]  # one word is not broken
    assert not [words for words in lists if not all("=" in word for word in words)]


def test_plan_that_does_not_fit_proposes_valid_overrides(plan, capsys) -> None:
    code, out, _ = plan("batch.per_device=4096")
    assert code == 0, "it is planned all the same"
    after = out.partition("make it fit")[2].splitlines()
    line = next(line for line in after if line.startswith("  batch."))
    again, out, err = plan(*(word for word in line.split() if "=" in word))
    assert again == 0, err
    assert out.startswith("fits ")


def test_json_has_record_fields(plan) -> None:
    code, out, _ = plan("--json", "--why", "batch.per_device=4096")
    assert code == 0
    memory = json.loads(out)["memory"]
    fields = dict(memory["predicted"])
    assert fields.pop("capacity") == 2 * GIB - PYTHON_BYTES
    found = PredictedMemory(**fields)
    assert found.low < found.expected < found.high
    assert sum(found.components.values()) == found.expected
    assert found.verdict == "does not fit"
    assert memory["advice"]
    content = json.loads(plan("hardware=v100_16", "--json")[1])
    step = content["timing"]["predicted_step_s"]
    assert 0 < step["low"] < step["expected"] < step["high"]
    assert content["throughput"]["predicted_samples_per_s"]["expected"] > 0


def test_all_devices_share_one_table(plan, monkeypatch) -> None:
    code, out, _ = plan("hardware=all")
    assert code == 0
    assert out.startswith(f"fits on {len(DEVICES)} of {len(DEVICES)} ")
    rows = {line.split()[0]: line for line in out.splitlines() if line.split()[:1]}
    assert set(DEVICES) <= set(rows)
    assert all(" to " in rows[option] for option in DEVICES), "samples/s"
    largest = [int(rows[option].split()[-1]) for option in ("t4", "a100_40", "a100_80", "b200")]
    assert largest == sorted(largest)
    assert max(map(len, out.splitlines())) <= 80
    assert "samples/s not calibrated" in out
    monkeypatch.setenv("COLUMNS", "60")
    _, out, _ = plan("hardware=all")
    assert max(map(len, out.splitlines())) <= 60


@pytest.mark.slow
def test_unsupported_format_is_shown_in_the_device_row(plan) -> None:
    code, out, _ = plan("hardware=all", "precision=bf16")
    assert code == 0
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.split()[:1]}
    assert rows["t4"][2] == "rejected"
    assert rows["h100"][2] == "fits"
    assert "-> precision=fp16" in out
    assert max(map(len, out.splitlines())) <= 80
    _, out, _ = plan("hardware=all", "precision=bf16", "--json")
    refused = {row["hardware"] for row in json.loads(out) if row["memory"] is None}
    assert {"t4", "v100_16"} <= refused
    assert "h100" not in refused


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero3", "dp"])
def test_several_devices_can_be_declared(strategy, plan) -> None:
    """Nobody can say how many there are, and what one of them needs is the question."""
    typed = (f"distributed={strategy}", "distributed.num_processes=4")
    code, out, err = plan("hardware=a100_40", *typed)
    assert code == 0, err
    assert out.startswith("fits ")
    assert "4 of them assumed" in plan("hardware=a100_40", *typed, "-v")[1]


def test_several_devices_of_each_model_can_be_declared(plan) -> None:
    typed = ("distributed=zero3", "distributed.num_processes=4")
    code, out, err = plan("hardware=all", *typed)
    assert code == 0, err
    assert "h100" in out
    assert "4 devices each" in out
    assert "samples/s: " in out


def test_model_that_no_device_can_run_is_an_error(plan) -> None:
    code, _, err = plan("hardware=all", "model.num_attention_heads=7")
    assert code == 2
    assert "model.num_attention_heads" in err


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """A cache of the test's own, and the plans that a trace was made of: 9 GiB, the first 10."""
    monkeypatch.setattr(
        sys.modules["eke.estimate.memory.trace_client"], "cache_folder", lambda: tmp_path
    )
    asked = []

    def traced(plan, *_):
        asked.append(plan)
        peak = (9 if len(asked) > 1 else 10) * GIB
        size = {"forward": peak}
        return trace_client.TraceResult(Traced(size, size, {"weights": peak}))

    monkeypatch.setattr(trace_client, "get_or_run_trace", traced)
    monkeypatch.setattr(
        trace_client, "trace_all", lambda plans, *_, **__: [traced(p) for p in plans]
    )
    return asked


@pytest.mark.slow
def test_uncertain_devices_are_traced(kept, capsys) -> None:
    typed = ["plan", *WORK, "hardware=all", "batch.per_device=1024"]
    assert cli(typed) == 0
    out = capsys.readouterr().out
    asked = {plan.choices["hardware"] for plan in kept}
    assert 0 < len(asked) < len(DEVICES)
    table = out.partition("micro-batch: ")[0]
    rows = {line.split()[0]: line.split() for line in table.splitlines() if line.split()[:1]}
    named = out.partition("by formulas, traced: ")[2].partition("\n\n")[0].replace("\n", " ")
    for option in asked:
        assert rows[option][2] == "fits"
        assert int(rows[option][-1]) >= 1024, "what is traced to fit is no smaller than itself"
        assert option in named
    kept.clear()
    assert cli([*typed, "--quick"]) == 0
    assert not kept
    assert "traced" not in capsys.readouterr().out


def test_uncertain_proposals_are_traced(kept, capsys) -> None:
    typed = ["plan", *WORK, "hardware=t4", "batch.per_device=2048", "--why"]
    assert cli(typed) == 0
    out = capsys.readouterr().out
    assert len(kept) > 1, "the plan itself, and what was proposed"
    assert "(traced): fits" in out.partition("need less memory")[2]


def test_no_proposal_needs_more_memory(kept, monkeypatch, capsys) -> None:
    """A trace of the plan may lie below the formulas for a proposal."""
    size = {"forward": 2**20}
    low = trace_client.TraceResult(Traced(size, size, {"weights": 2**20}))
    monkeypatch.setattr(trace_client, "get_or_run_trace", lambda *_: low)
    assert cli(["plan", *WORK, "hardware=rtx4090", "--why"]) == 0
    assert "need less memory, " not in capsys.readouterr().out


@pytest.mark.parametrize("many", [("-m", "seed=0,1"), ("hardware=all",)], ids=["a sweep", "all"])
def test_why_requires_a_single_plan(many, capsys) -> None:
    assert cli(["plan", "--why", *WORK, *many]) == 2
    assert "--why" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        (("hardware=all",), "plan_only=true"),
        (("-m", "hardware=all", "seed=0,1", "plan_only=true"), "hardware=h100"),
    ],
)
def test_hardware_all_is_only_for_planning(arguments, fix, capsys) -> None:
    assert workflows.main([*WORK, *arguments]) == 2
    assert fix in capsys.readouterr().err


def test_run_that_cannot_fit_does_not_start(capsys, tmp_path) -> None:
    assert workflows.main([*WORK, "batch.per_device=4096"]) == 2
    err = capsys.readouterr().err
    assert "needs at least" in err
    assert "batch.accumulation=" in err
    assert "ignore_forecast=true" in err
    assert not list(tmp_path.iterdir()), "nothing was made"


def test_trace_uses_the_real_builders(capsys, monkeypatch, tmp_path) -> None:
    """A real one, in a process of its own; asked again it is read from the disk."""
    monkeypatch.setattr(
        sys.modules["eke.estimate.memory.trace_client"], "cache_folder", lambda: tmp_path
    )
    texts = []
    for _ in range(2):
        assert cli(["plan", *WORK, "batch.per_device=2"]) == 0
        texts.append(capsys.readouterr().out)
    assert ", traced)" in texts[0]
    assert texts[0] == texts[1]
    assert len(list(tmp_path.glob("traces/*.json"))) == 1


def test_plan_shows_a_step_time_or_the_missing_runs(plan) -> None:
    _, out, _ = plan("hardware=a100_80", "precision=bf16")
    assert "source  estimate by " in out
    assert "GPU-hours" in out
    _, out, _ = plan()
    assert "time  unknown: " in out


@pytest.mark.slow
def test_every_device_has_its_speed(plan) -> None:
    busy = ("model=bert_large", "task=sequence_classification", "data.seq_len=512")
    _, out, _ = plan("hardware=all", "precision=fp16", *busy, "--json")
    rates = {
        row["hardware"]: row["throughput"]["predicted_samples_per_s"]["expected"]
        for row in json.loads(out)
    }
    assert rates["v100_16"] < rates["h100"]


@pytest.mark.slow
def test_sweep_hours_are_summed(capsys) -> None:
    code = workflows.main(
        [*WORK, "-m", "hardware=a100_80", "precision=bf16,fp16,fp32", "plan_only=true"]
    )
    out = capsys.readouterr().out
    assert code == 0
    assert "GPU-hours (estimate)" in out
    assert "for 3 runs" in " ".join(out.split())


def test_advice_names_the_time_model(plan) -> None:
    _, out, _ = plan("--why", "hardware=t4", "model=llama_1b", "precision=fp16")
    assert "the time model's estimate" in " ".join(out.split())
