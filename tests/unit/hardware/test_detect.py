"""The device a run gets, on machines of every kind."""

import importlib
import sys

import pytest

from eke.common.errors import ConfigError
from eke.hardware import DEVICES, choose_device, detect
from eke.hardware.cpu import TorchBuild, torch_build

detect_module = importlib.import_module("eke.hardware.cpu")  # its function has the same name
H200 = "NVIDIA H200"


def test_gpus_are_counted_and_described(machine):
    fake = machine(H200, H200, memory_mib=143771, capability=(9, 0))
    device = detect()
    assert (device.kind, device.name, device.count) == ("cuda", H200, 2)
    assert device.memory_bytes == 143771 * 2**20
    assert device.capability == (9, 0)
    assert device.peak("bfloat16") == DEVICES["h200"].peak("bfloat16")
    assert device.source == DEVICES["h200"].source
    assert device.present
    assert fake.open_sessions == 0


@pytest.mark.parametrize(
    ("reserved_mib", "gib"), [(None, 79.65), (551, 79.11)], ids=["older driver", "told"]
)
def test_driver_reserve_is_excluded_from_capacity(machine, reserved_mib, gib):
    name = "NVIDIA H100 80GB HBM3"
    machine(name, memory_mib=81559, reserved_mib=reserved_mib, capability=(9, 0))
    assert detect().memory_bytes / 2**30 == pytest.approx(gib, abs=0.005)


VISIBLE = {
    None: ["a", "b", "c"], "2,0": ["c", "a"], " 1 , 2 ": ["b", "c"], "": [], "-1": [],
    "0,-1,1": ["a"], "0,7,1": ["a"], "1,1": [], "GPU-1a7f-1": ["b"], "GPU-2a": ["c"],
    "GPU-": [], "GPU-ffff": [], "MIG-7": ["a MIG"], "MIG-8": [], "NoDevFiles": [],
}  # fmt: skip
"""CUDA_VISIBLE_DEVICES -> the GPUs: what is unknown, ambiguous or negative ends the list."""


@pytest.mark.parametrize("visible", VISIBLE, ids=str)
def test_cuda_visible_devices_is_respected(machine, monkeypatch, visible):
    machine("a", "b", "c", slices=[("a", "MIG-7", 4864)])
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    device, names = detect(), VISIBLE[visible]
    if not names:
        assert device.kind == "cpu"
        assert device.note == f"CPU: CUDA_VISIBLE_DEVICES={visible} leaves no GPU visible"
    else:
        assert (device.name, device.count) == (names[0], len(names))


@pytest.mark.parametrize(
    ("visible", "name", "memory_mib"),
    [
        pytest.param(None, "a MIG", 4864, id="unset"),
        pytest.param("0", "a MIG", 4864, id="the parent by number"),
        pytest.param("GPU-0a7f-0", "a MIG", 4864, id="the parent by UUID"),
        pytest.param("MIG-8", "a MIG", 9728, id="one slice"),
        pytest.param("MIG-8,MIG-7", "a MIG", 9728, id="two slices: a process sees the first"),
        pytest.param("1", "b", 81920, id="another GPU"),
        pytest.param("1,0", "a MIG", 4864, id="with a slice no whole GPU is enumerated"),
        pytest.param("2", None, None, id="in MIG mode, without a slice"),
    ],
)
def test_sliced_gpu_is_not_counted_as_a_full_gpu(machine, monkeypatch, visible, name, memory_mib):
    slices = [("a", "MIG-7", 4864), ("a", "MIG-8", 9728)]
    fake = machine("a", "b", "c", slices=slices)
    fake.sliced = {"GPU-0a7f-0", "GPU-2a7f-2"}
    for piece in fake.slices:
        piece.parent = "GPU-0a7f-0"
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    device = detect()
    if name is None:
        assert device.kind == "cpu"
        return
    assert (device.name, device.count) == (name, 1)
    assert device.memory_bytes == memory_mib * 2**20


def test_mixed_gpu_models_are_noted(machine):
    machine("NVIDIA A100-SXM4-80GB", H200)
    device = detect()
    assert (device.name, device.count) == ("NVIDIA A100-SXM4-80GB", 2)
    assert "2 GPUs of different models (NVIDIA A100-SXM4-80GB, NVIDIA H200)" in device.note
    assert "CUDA_VISIBLE_DEVICES" in device.note


def test_unknown_gpu_has_no_peaks_and_missing_answers_are_none(machine):
    machine("NVIDIA RTX 9090", memory_mib=None, capability=None)
    device = detect()
    assert (device.kind, device.peak_flops, device.source) == ("cuda", (), "")
    assert "MFU is not reported" in device.note
    assert (device.memory_bytes, device.capability) == (None, None)


@pytest.mark.parametrize(
    ("broken", "names", "reason"),
    [
        pytest.param("init", [H200], "Driver/library version mismatch", id="driver-mismatch"),
        pytest.param("count", [H200], "the NVIDIA driver returned an error", id="driver-fails"),
        pytest.param("", [], "the NVIDIA driver lists no GPU", id="no-gpu"),
    ],
)
def test_cpu_is_used_without_a_gpu_and_the_note_has_the_reason(machine, broken, names, reason):
    fake = machine(*names, broken=broken)
    device = detect()
    assert device.kind == "cpu"
    assert device.note.startswith("CPU: ")
    assert reason in device.note
    assert fake.open_sessions == 0


def test_missing_pynvml_selects_the_cpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert detect().note == "CPU: nvidia-ml-py is not installed"


def test_cpu_build_of_torch_selects_the_cpu(machine, monkeypatch):
    machine(H200)
    monkeypatch.setattr(detect_module, "torch_build", lambda: TorchBuild("2.13.0+cpu", None))
    device = detect()
    assert device.kind == "cpu"
    assert (
        "torch 2.13.0+cpu is built without CUDA, so 1 x NVIDIA H200 cannot be used" in device.note
    )
    monkeypatch.setattr(detect_module, "torch_build", lambda: None)
    assert detect().kind == "cuda", "without torch they are still shown"


def test_installed_torch_agrees_with_its_files():
    import torch

    assert torch_build() == TorchBuild(torch.version.__version__, torch.version.cuda)


def test_hardware_auto_and_cpu_choose_a_device(machine):
    machine(H200)
    assert choose_device("auto") == (detect(), "1 x NVIDIA H200, found through the NVIDIA driver")
    device, reason = choose_device("cpu")
    assert (device.kind, device.count, device.present) == ("cpu", 1, True)
    assert reason == "CPU: hardware=cpu"


def test_declared_device_is_present_only_with_its_model(machine):
    machine(H200, H200, memory_mib=143000)
    here, _ = choose_device("h200")
    assert here.present
    assert (here.count, here.memory_bytes) == (2, 143000 * 2**20)
    elsewhere, reason = choose_device("h100")
    assert not elsewhere.present
    assert elsewhere.memory_bytes == DEVICES["h100"].memory_bytes
    assert reason == ("declared by hardware=h100, for planning only: this machine has NVIDIA H200")


def test_unknown_option_names_the_nearest(machine):
    machine()
    with pytest.raises(ConfigError, match="hardware = h10") as caught:
        choose_device("h10")
    assert str(caught.value.problems[0].fix) == "hardware=h100"
    assert "20 known devices: auto, cpu, v100_16" in caught.value.problems[0].why
