"""`eke doctor`: options put to the rules, and what is printed; no torch, no GPU."""

import dataclasses
import json
import sys
from functools import cache

import pytest
from unit.hardware.conftest import FakeGpu, FakeNvml
from unit.rules.devices import CPU, H200, V100

from eke.cli import main
from eke.cli.doctor import (
    LEFT_OUT,
    NEEDS_MORE,
    ask_torch,
    find_options,
    inspect_machine,
    render_examination,
    torch_answer,
)
from eke.config.compose.catalogue import make_catalogue

WIDTH = 100


SECRET = "5ec4e7" * 7


@pytest.fixture(scope="module")
def found():
    """An examination of a machine with two GPUs, whose torch has a CUDA build."""
    answer = {"version": "2.13.0", "built_for_cuda": "13.0", "cuda_available": True, "num_gpus": 2,
              "cudnn": 91900, "nccl": "2.28.9"}  # fmt: skip
    gpus = [FakeGpu("NVIDIA H100 80GB HBM3", f"GPU-{n}", processes=[(7, 2**31)]) for n in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_API_KEY", SECRET)
        patch.setitem(sys.modules, "pynvml", FakeNvml(gpus, "", []))
        patch.setattr("eke.cli.doctor.detect", lambda: dataclasses.replace(H200, count=2))
        patch.setattr("eke.cli.doctor.ask_torch", lambda: None)
        patch.setattr("eke.cli.doctor.torch_answer", lambda _: answer)
        return inspect_machine()


@cache
def findings_of(device):
    present = dataclasses.replace(device, present=True)
    return {(f.group, f.option): f for f in find_options(present)}


@pytest.mark.slow
def test_every_option_is_checked_with_its_requirements() -> None:
    catalogue = make_catalogue()
    asked = {(g, o) for g, options in catalogue.options.items() for o in options}
    left_out = {(g, o) for g, o in asked if g in LEFT_OUT} | NEEDS_MORE
    assert set(findings_of(CPU)) == asked - left_out
    finding = findings_of(CPU)["memory", "max_savings"]
    assert not finding.usable
    assert finding.overrides == ("train.max_grad_norm=null",)
    assert finding.why


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "option", "words"),
    [
        (CPU, ("precision", "tf32"), "is a CPU"),
        (CPU, ("offload", "nvme"), ""),  # with a folder
        (V100, ("precision", "bf16"), "has compute capability 7.0"),
        (V100, ("distributed", "ddp"), "Available: 1"),
        (CPU, ("model", "llama3_8b"), "8.03 B parameters need"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_unusable_option_has_a_reason_and_a_fix(device, option, words) -> None:
    finding = findings_of(device)[option]
    assert not finding.usable
    assert words in finding.why
    assert finding.fix


@pytest.mark.slow
def test_portable_options_are_usable_on_every_device() -> None:
    for device in (CPU, H200):
        findings = findings_of(device)
        for option in (("precision", "fp32"), ("optimizer", "adamw"), ("model", "tiny_t5")):
            assert findings[option].usable, findings[option]


@pytest.mark.slow
def test_missing_package_makes_its_option_unusable(monkeypatch) -> None:
    monkeypatch.setattr("eke.rules.requirements.find_spec", lambda name: None)
    finding = findings_of.__wrapped__(CPU)["tracker", "mlflow"]
    assert not finding.usable
    assert "pip install" in finding.fix


@pytest.mark.slow
def test_text_fits_its_columns_and_hides_keys(found) -> None:
    text = render_examination(found, WIDTH)
    assert found["wandb_key"]
    assert SECRET not in text + repr(found)
    assert max(len(line) for line in text.splitlines()) <= WIDTH
    text = " ".join(text.split())
    assert "slowed down by power cap, hardware thermal" in text
    assert "2.00 GiB of 80.00 GiB in use" in text
    assert "not tf32" not in text
    assert "NCCL 2.28.9" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("questions", "words"),
    [
        ("raise ImportError('libcudart.so.13 is missing')", "libcudart.so.13 is missing"),
        ("import os; os.abort()", "exit code -6"),
        ("import time; time.sleep(60)", "more than 0.5 s"),
    ],
    ids=["broken", "crashes", "hangs"],
)
def test_torch_that_fails_to_import_is_reported(questions, words, found) -> None:
    answer = torch_answer(ask_torch(questions), timeout_s=0.5 if "sleep" in questions else 60)
    assert words in answer["error"]
    assert "fails to start" in render_examination({**found, "torch": answer})


def test_local_torch_file_is_not_imported(tmp_path, monkeypatch) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit(66)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", ":/x")
    asked = (
        "from importlib.util import find_spec as f; print('{\"at\": \"%s\"}' % f('torch').origin)"
    )
    assert not torch_answer(ask_torch(asked))["at"].startswith(str(tmp_path))


@pytest.mark.slow
def test_doctor_runs_on_this_machine(capfd) -> None:
    assert main(["doctor", "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert answer["torch"]["version"] == answer["versions"]["torch"]
    assert answer["num_cores"] >= 1
    assert {o["group"] for o in answer["options"]} >= {"precision", "optimizer", "distributed"}
