"""The CPU as a training device: its name, and the memory this process may really use."""

import os
import platform
from contextlib import suppress
from pathlib import Path

from eke.common.units import MIB
from eke.hardware.device import Device

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")

LIMIT_V1, LIMIT_V2 = "memory.limit_in_bytes", "memory.max"

_USE = {
    LIMIT_V1: ("memory.usage_in_bytes", "total_inactive_file"),
    LIMIT_V2: ("memory.current", "inactive_file"),
}
"""Beside each limit: what is in use, and the line of `memory.stat` with what can be taken back."""

AVAILABLE_STEP = 256 * MIB

BFLOAT16_UNITS = ("amx_bf16", "avx512_bf16", "bf16")
"""As /proc/cpuinfo calls them: Linux' arch/x86/include/asm/cpufeatures.h and
arch/arm64/kernel/cpuinfo.c."""


def cpu_device(note: str = "") -> Device:
    """This machine's CPU: one device, whatever its cores.

    Args:
        note: why the CPU and not a GPU.
    """
    return Device(
        kind="cpu",
        name=cpu_name(),
        memory_bytes=memory_limit(),
        available_bytes=memory_available(),
        note=note,
    )


def usable_cores() -> int:
    """Cores this process may use (a container or a job scheduler may leave it few)."""
    return len(os.sched_getaffinity(0))


def bfloat16_units(proc: Path = _PROC) -> tuple[str, ...]:
    """This CPU's instructions that multiply bfloat16, by the kernel's names; empty without any.

    `avx512_bf16` and `amx_bf16` on x86, `bf16` on ARM. Without them PyTorch converts to float32
    around each product, which is slower than float32 itself.
    """
    try:
        with open(proc / "cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() in ("flags", "Features"):
                    return tuple(name for name in BFLOAT16_UNITS if name in value.split())
    except OSError:
        pass
    return ()


def cpu_name(proc: Path = _PROC) -> str:
    """Model name from /proc/cpuinfo; where there is none (ARM, macOS) the architecture."""
    try:
        with open(proc / "cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() == "model name" and value.strip():
                    return " ".join(value.split())
    except OSError:
        pass
    return platform.machine() or "cpu"


def memory_limit(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    """Bytes this process may use: the machine's memory or the tightest cgroup limit above it.

    A container or a SLURM job is killed at its cgroup's limit, long before the machine is full.
    """
    limits = [limit for limit in (_physical(), _cgroup_limit(proc, cgroups)) if limit]
    return min(limits) if limits else None


def memory_available(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    """Bytes that are left of it now, in whole steps of 256 MiB; None where Linux does not tell.

    What others hold is not there to be trained in: the kernel ends a process for taking it.
    Rounded down, since what others hold changes all the time and a plan should not.
    """
    free = [*_machine_has_left(proc), *_cgroups_have_left(proc, cgroups)]
    return max(0, min(free)) // AVAILABLE_STEP * AVAILABLE_STEP if free else None


def _machine_has_left(proc: Path) -> list[int]:
    """The kernel's own estimate (proc(5), MemAvailable): free memory and what it can take back."""
    try:
        for line in (proc / "meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return [int(value.split()[0]) * 1024]
    except (OSError, ValueError, IndexError):
        pass
    return []


def _cgroups_have_left(proc: Path, cgroups: Path) -> list[int]:
    """Limit less use of this process's cgroup and its ancestors, where they have one.

    Files that were read count as used; the kernel takes back those that are inactive.
    """
    return [
        limit - used
        for limit, place, file in _limits_above(proc, cgroups)
        if (used := _used(place, file)) is not None
    ]


def _used(place: Path, limit: str) -> int | None:
    """Bytes a cgroup holds that cannot be taken back."""
    current, inactive = _USE[limit]
    try:
        stat = dict(line.split() for line in (place / "memory.stat").read_text().splitlines())
        return int((place / current).read_text()) - int(stat.get(inactive, 0))
    except (OSError, ValueError):
        return None


def _physical() -> int | None:
    """Bytes of memory in the machine; None where POSIX's names for it are unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _cgroup_limit(proc: Path, cgroups: Path) -> int | None:
    """The tightest limit of this process's cgroup and its ancestors."""
    return min((limit for limit, _, _ in _limits_above(proc, cgroups)), default=None)


def _limits_above(proc: Path, cgroups: Path) -> list[tuple[int, Path, str]]:
    """Limits of this process's cgroup and its ancestors, version 2 and 1, with folder and file."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        # hierarchy:controllers:path; version 2 has an empty list of controllers
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            found += _limits(cgroups, path, LIMIT_V2)
            # both versions mounted at once: systemd's hybrid layout
            found += _limits(cgroups / "unified", path, LIMIT_V2)
        elif "memory" in controllers.split(","):
            found += _limits(cgroups / "memory", path, LIMIT_V1)
    return found


def _limits(root: Path, path: str, file: str) -> list[tuple[int, Path, str]]:
    """Limits in `file` from the cgroup at `path` up to `root`.

    Inside a container `path` may be the host's and not exist here; the root is then the
    container's. Version 1 writes about 2**63 for "no limit", which is more than any machine has.
    """
    folder = root / path.strip().lstrip("/")
    found = []
    for place in (folder, *folder.parents):
        with suppress(OSError, ValueError):  # not here, or "max"
            found.append((int((place / file).read_text()), place, file))
        if place == root:
            break
    return found
