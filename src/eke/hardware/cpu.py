"""Detection of CPU, memory limits, file systems, torch build and the device of a plan."""

import difflib
import importlib.util
import os
import platform
import runpy
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.text import MIB
from eke.hardware import nvidia
from eke.hardware.datasheets import DEVICES, Device, add_datasheet_specs, device_option
from eke.hardware.nvidia import Gpu

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")

LIMIT_V1, LIMIT_V2 = "memory.limit_in_bytes", "memory.max"

_USE = {
    LIMIT_V1: ("memory.usage_in_bytes", "total_inactive_file"),
    LIMIT_V2: ("memory.current", "inactive_file"),
}
"""Limit file -> file with current use, and line of `memory.stat` with reclaimable bytes."""

_AVAILABLE_STEP = 256 * MIB
"""Granularity of available memory, so that small changes do not change a plan."""


def cpu_device(note: str = "") -> Device:
    """Return the CPU as one device. `note` is the reason for not using a GPU."""
    limit, available = memory_limit(), memory_available()
    return Device("cpu", cpu_name(), 1, limit, available, note=note)


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def bfloat16_units(proc: Path = _PROC) -> tuple[str, ...]:
    """Return the CPU's bfloat16 instruction sets. Without them float32 is faster."""
    flags = _cpuinfo(proc, "flags", "Features").split()
    # Names in Linux: arch/x86/include/asm/cpufeatures.h and arch/arm64/kernel/cpuinfo.c.
    return tuple(name for name in ("amx_bf16", "avx512_bf16", "bf16") if name in flags)


def cpu_name(proc: Path = _PROC) -> str:
    """Return the model name from /proc/cpuinfo, else the architecture (ARM, macOS)."""
    return _cpuinfo(proc, "model name") or platform.machine() or "cpu"


def _cpuinfo(proc: Path, *names: str) -> str:
    """Return the first value in /proc/cpuinfo under one of the names, "" without one."""
    with suppress(OSError), open(proc / "cpuinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            key, _, value = line.partition(":")
            if key.strip() in names and value.strip():
                return " ".join(value.split())
    return ""


def memory_limit(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    """Return the bytes this process may use: the machine's memory or the lowest cgroup limit."""
    limits = [_physical(), *(limit for limit, _, _ in _limits_above(proc, cgroups))]
    return min(filter(None, limits), default=None)


def memory_available(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    """Return the smallest of MemAvailable (proc(5)) and free bytes in cgroups, None if unknown."""
    free = [
        limit - used
        for limit, place, file in _limits_above(proc, cgroups)
        if (used := _used(place, file)) is not None
    ]
    with suppress(OSError, ValueError, KeyError):
        lines = (proc / "meminfo").read_text().splitlines()
        sizes = dict(line.split(":", 1) for line in lines)
        free.append(int(sizes["MemAvailable"].split()[0]) * 1024)
    return max(0, min(free)) // _AVAILABLE_STEP * _AVAILABLE_STEP if free else None


def _used(place: Path, limit: str) -> int | None:
    """Return the bytes used by a cgroup without inactive file pages, which are reclaimable."""
    current, inactive = _USE[limit]
    try:
        stat = dict(line.split() for line in (place / "memory.stat").read_text().splitlines())
        return int((place / current).read_text()) - int(stat.get(inactive, 0))
    except (OSError, ValueError):
        return None


def _physical() -> int | None:
    with suppress(AttributeError, OSError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def _limits_above(proc: Path, cgroups: Path) -> list[tuple[int, Path, str]]:
    """Return the limits of this process's cgroups and their ancestors, with folder and file."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        # hierarchy:controllers:path; cgroup version 2 has no controllers
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers:
            found += _limits(cgroups, path, LIMIT_V2)
            # both versions mounted: systemd's hybrid layout
            found += _limits(cgroups / "unified", path, LIMIT_V2)
        elif "memory" in controllers.split(","):
            found += _limits(cgroups / "memory", path, LIMIT_V1)
    return found


def _limits(root: Path, path: str, file: str) -> list[tuple[int, Path, str]]:
    """Return the limits in `file` from the cgroup at `path` (may be missing) up to `root`."""
    folder = root / path.strip().lstrip("/")
    found = []
    for place in (folder, *folder.parents):
        with suppress(OSError, ValueError):  # missing, or "max"
            found.append((int((place / file).read_text()), place, file))
        if place == root:
            break
    return found


def file_system(path: Path, mounts: Path = _PROC / "self/mounts") -> str:
    """Return the file system type of a path (`ext4`, `nfs4`, `tmpfs`), "" if unknown."""
    try:
        rows = [line.split() for line in mounts.read_text(errors="replace").splitlines()]
    except OSError:
        return ""
    place = path.resolve()
    # The last of several mounts on one folder is active. A space in a name is \\040.
    known = {row[1].encode().decode("unicode_escape"): row[2] for row in rows if len(row) > 2}
    return next((known[str(p)] for p in (place, *place.parents) if str(p) in known), "")


class TorchBuild(NamedTuple):
    """Installed build of torch."""

    version: str
    """Version with build: `2.13.0+cpu`."""
    cuda: str | None
    """CUDA version of the build, None without CUDA."""


def torch_build() -> TorchBuild | None:
    """Read the build of torch from its `version.py`, since importing torch takes seconds."""
    with suppress(ImportError, ValueError, OSError, SyntaxError, KeyError):
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.origin:
            facts = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
            return TorchBuild(facts["__version__"], facts["cuda"])
    return None


def detect() -> Device:
    """Return the device for training here: the visible GPUs, else the CPU, with the reason."""
    gpus, reason = nvidia.ask_driver(nvidia.visible_gpus)
    if not gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = f"CUDA_VISIBLE_DEVICES={visible} leaves no GPU visible"
        return cpu_device(f"CPU: {reason or (nvidia.NO_GPU if visible is None else hidden)}")
    build = torch_build()
    if build is not None and build.cuda is None:
        unused = f"{len(gpus)} x {gpus[0].name} cannot be used (install a CUDA build of torch)"
        return cpu_device(f"CPU: torch {build.version} is built without CUDA, so {unused}")
    return _gpu_device(gpus)


def _gpu_device(gpus: list[Gpu]) -> Device:
    """Return the visible GPUs as one device; if models differ, the first one is used for all."""
    first = gpus[0]
    note = f"{len(gpus)} x {first.name}, found through the NVIDIA driver"
    if len(models := list(dict.fromkeys(gpu.name for gpu in gpus))) > 1:
        taken = f"planned as {first.name} (select with CUDA_VISIBLE_DEVICES)"
        note = f"{len(gpus)} GPUs of different models ({', '.join(models)}), {taken}"
    found = Device("cuda", first.name, len(gpus), first.memory_bytes, capability=first.capability)
    device = add_datasheet_specs(found)
    if not device.peak_flops:
        note += ", peak FLOP/s unknown, so MFU is not reported"
    return replace(device, note=note, host_memory_bytes=memory_limit())


def choose_device(option: str) -> tuple[Device, str]:
    """Return the device for `hardware=<option>` and the reason; ConfigError: unknown option."""
    if option == "cpu":
        device = cpu_device("CPU: hardware=cpu")
        return device, device.note
    if option != "auto" and option not in DEVICES:
        known = ["auto", "cpu", *DEVICES]
        nearest = difflib.get_close_matches(option, known, n=1) or ["auto"]
        why = f"not one of the {len(known)} known devices: {', '.join(known)}"
        problem = Problem("hardware", option, why, Fix(f"hardware={nearest[0]}"), "unknown_option")
        raise ConfigError(problem)
    found = detect()
    if option == "auto" or device_option(found.name) == option:  # this machine has the model
        return found, found.note
    declared = DEVICES[option]
    reason = f"declared by hardware={option}, for planning only: this machine has {found.name}"
    return replace(declared, note=reason), reason
