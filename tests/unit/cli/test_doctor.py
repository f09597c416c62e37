"""`eke doctor`: options put to the rules, and what is printed; no torch, no GPU."""

import dataclasses
import json
import sys

import pytest
from unit.hardware.test_gpus import TwoGpus
from unit.rules.devices import CPU, H200, V100

from eke.cli import main
from eke.cli.doctor import (
    LEFT_OUT,
    NEEDS_MORE,
    TorchProbe,
    examine,
    find_options,
    render_examination,
)
from eke.config.compose import compose
from eke.config.compose.catalogue import make_catalogue
from eke.rules import Facts, check

WIDTH = 100


class Told:
    """A probe that has its answer."""

    def __init__(self, **answer):
        self.said = {
            "version": "2.13.0", "built_for_cuda": "13.0", "cuda_available": True, "num_gpus": 2,
            "cudnn": 91900, "nccl": "2.28.9", **answer,
        }  # fmt: skip

    def answer(self):
        return self.said


@pytest.fixture
def found(monkeypatch):
    """An examination of a machine with two GPUs, whose torch has a CUDA build."""
    monkeypatch.setitem(sys.modules, "pynvml", TwoGpus())
    monkeypatch.setattr("eke.cli.doctor.detect", lambda: dataclasses.replace(H200, count=2))
    return examine(Told)


def findings_of(device):
    present = dataclasses.replace(device, present=True)
    return {(f.group, f.option): f for f in find_options(present)}


def test_every_option_is_put_to_the_rules() -> None:
    catalogue = make_catalogue()
    asked = {(g, o) for g, options in catalogue.options.items() for o in options}
    left_out = {(g, o) for g, o in asked if g in LEFT_OUT} | NEEDS_MORE
    assert set(findings_of(CPU)) == asked - left_out


@pytest.mark.parametrize(
    ("option", "beside"),
    [
        (("offload", "optimizer_cpu"), ("distributed=zero2", "distributed.num_processes=1")),
        (("memory", "max_savings"), ("train.max_grad_norm=null",)),
        (("optimizer", "adamw"), ()),
    ],
    ids=["two keys", "one key", "nothing"],
)
def test_what_an_option_needs_beside_it_is_typed(option, beside) -> None:
    finding = findings_of(CPU)[option]
    assert finding.usable, finding
    assert finding.beside == beside
    typed = ["tracker=none", "=".join(option), *beside]
    device = dataclasses.replace(CPU, present=True)
    assert check(Facts(compose(typed).config, device))[0] == []


def test_state_on_a_disk_is_put_to_the_rules_with_a_folder(monkeypatch) -> None:
    monkeypatch.setattr("eke.rules.deepspeed.has_libaio_header", lambda flags: False)
    finding = findings_of(CPU)["offload", "nvme"]
    assert not finding.usable
    assert "libaio" in finding.why
    assert finding.beside == ()
    monkeypatch.setattr("eke.rules.deepspeed.has_libaio_header", lambda flags: True)
    monkeypatch.setattr("eke.rules.deepspeed.file_system", lambda folder: "ext4")
    finding = findings_of(CPU)["offload", "nvme"]
    assert finding.usable, finding
    assert "distributed=zero3" in finding.beside


def test_what_is_typed_beside_an_option_is_shown(found) -> None:
    lines = [line.strip() for line in render_examination(found, 200).splitlines()]
    assert "max_savings with train.max_grad_norm=null" in lines


@pytest.mark.parametrize(
    ("device", "option", "words"),
    [
        (CPU, ("precision", "tf32"), "is a CPU"),
        (V100, ("precision", "bf16"), "has compute capability 7.0"),
        (V100, ("distributed", "ddp"), "there are 1"),
        (CPU, ("model", "llama3_8b"), "8.03 B parameters need"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_run_is_named_with_its_reason(device, option, words) -> None:
    finding = findings_of(device)[option]
    assert not finding.usable
    assert words in finding.why
    assert finding.fix


def test_what_runs_anywhere_is_usable_anywhere() -> None:
    for device in (CPU, H200):
        findings = findings_of(device)
        for option in (("precision", "fp32"), ("optimizer", "adamw"), ("model", "tiny_t5")):
            assert findings[option].usable, findings[option]


def test_a_missing_package_makes_its_option_unusable(monkeypatch) -> None:
    monkeypatch.setattr("eke.rules.device.find_spec", lambda name: None)
    finding = findings_of(CPU)["tracker", "mlflow"]
    assert not finding.usable
    assert "pip install" in finding.fix


def test_the_text_fits_its_columns(found) -> None:
    text = render_examination(found, WIDTH)
    assert max(len(line) for line in text.splitlines()) <= WIDTH
    assert "slowed down by power cap, hardware thermal" in text
    assert "2.00 GiB of 80.00 GiB in use" in text
    assert "not tf32" not in text
    assert "NCCL 2.28.9" in text


def test_no_key_is_ever_shown(found, monkeypatch) -> None:
    secret = "5ec4e7" * 7
    monkeypatch.setenv("WANDB_API_KEY", secret)
    again = examine(Told)
    assert again.wandb_key
    assert secret not in render_examination(again) + json.dumps(dataclasses.asdict(again))


@pytest.mark.parametrize(
    ("questions", "words"),
    [
        ("raise ImportError('libcudart.so.13 is missing')", "libcudart.so.13 is missing"),
        ("import os; os.abort()", "exit code -6"),
        ("import time; time.sleep(60)", "more than 0.5 s"),
    ],
    ids=["broken", "crashes", "hangs"],
)
def test_a_torch_that_does_not_start_is_reported(questions, words, found) -> None:
    answer = TorchProbe(questions, timeout_s=0.5 if "sleep" in questions else 60).answer()
    assert words in answer["error"]
    told = dataclasses.replace(found, torch=answer)
    assert "does not start" in render_examination(told)


@pytest.mark.slow
def test_on_this_machine(capfd) -> None:
    assert main(["doctor", "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert answer["torch"]["version"] == answer["versions"]["torch"]
    assert answer["num_cores"] >= 1
    assert {o["group"] for o in answer["options"]} >= {"precision", "optimizer", "distributed"}
