"""Which device a run started here gets, and which one it is planned for."""

import difflib
import os
from dataclasses import replace

from eke.common.errors import ConfigError, Problem
from eke.hardware import nvml
from eke.hardware.cpu import cpu_device
from eke.hardware.datasheets import DEVICES, option_of, with_datasheet
from eke.hardware.device import Device
from eke.hardware.nvml import Gpu
from eke.hardware.torch_build import TorchBuild, torch_build


def detect() -> Device:
    """The device torch would train on here: the visible GPUs, else the CPU; `note` says why.

    Never raises: a driver that does not answer is a machine without a GPU, and the note says so.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    with nvml.session() as (library, reason):
        gpus: list[Gpu] = []
        if library is not None:
            try:
                handles = nvml.visible_handles(library, visible)
                mine = nvml.seen_by_one_process(library, handles)
                gpus = [nvml.describe(library, handle) for handle in mine]
            except library.NVMLError as error:
                gpus, reason = [], f"the NVIDIA driver does not answer: {error}"
            else:
                reason = "the NVIDIA driver lists no GPU"
                if visible is not None:
                    reason = f"CUDA_VISIBLE_DEVICES={visible} leaves no GPU visible"
    if not gpus:
        return cpu_device(f"CPU: {reason}")
    build = torch_build()
    if build is not None and build.cuda is None:
        return cpu_device(_cpu_build_note(gpus, build))
    return _gpu_device(gpus)


def _cpu_build_note(gpus: list[Gpu], build: TorchBuild) -> str:
    """Why the CPU is used on a machine with GPUs."""
    return (
        f"CPU: torch {build.version} is built without CUDA, so {len(gpus)} x {gpus[0].name} "
        "cannot be used; install a CUDA build of torch"
    )


def _gpu_device(gpus: list[Gpu]) -> Device:
    """The visible GPUs as one device; of mixed models the first stands for all (see its note)."""
    first = gpus[0]
    note = f"{len(gpus)} x {first.name}, found through the NVIDIA driver"
    if len(models := list(dict.fromkeys(gpu.name for gpu in gpus))) > 1:
        note = (
            f"{len(gpus)} GPUs of different models ({', '.join(models)}), planned as if all were "
            f"{first.name}; CUDA_VISIBLE_DEVICES chooses among them"
        )
    device = Device(
        kind="cuda",
        name=first.name,
        count=len(gpus),
        memory_bytes=first.memory_bytes,
        capability=first.capability,
        note=note,
    )
    device = with_datasheet(device)
    if not device.peak_flops:
        note += "; its peak FLOP/s are not known, so there is no MFU"
    return replace(device, note=note)


def choose(option: str) -> tuple[Device, str]:
    """The device that `hardware=<option>` plans for, and the reason in one clause.

    Args:
        option: `auto`, `cpu` or a device of the table. Such a device is `present` only where this
            machine has that very model; its count and memory are then this machine's.

    Raises:
        ConfigError: no such option.
    """
    if option == "cpu":
        device = cpu_device("CPU: hardware=cpu")
        return device, device.note
    if option != "auto" and option not in DEVICES:
        raise ConfigError(_unknown(option))
    found = detect()
    if option == "auto":
        return found, found.note
    if option_of(found.name) == option:
        return found, found.note
    declared = DEVICES[option]
    reason = f"declared by hardware={option}, for planning only: this machine has {found.name}"
    return replace(declared, note=reason), reason


def _unknown(option: str) -> Problem:
    """No such device, with the nearest one that there is."""
    known = ["auto", "cpu", *DEVICES]
    nearest = difflib.get_close_matches(option, known, n=1) or ["auto"]
    return Problem(
        path="hardware",
        value=option,
        why=f"not one of the {len(known)} known devices: {', '.join(known)}",
        fix=f"hardware={nearest[0]}",
    )
