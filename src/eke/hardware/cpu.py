"""The CPU as a training device: its name, and the memory this process may really use."""

import os
import platform
from contextlib import suppress
from pathlib import Path

from eke.hardware.device import Device

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")

BFLOAT16_UNITS = ("amx_bf16", "avx512_bf16", "bf16")
"""As /proc/cpuinfo calls them: Linux' arch/x86/include/asm/cpufeatures.h and
arch/arm64/kernel/cpuinfo.c."""


def cpu_device(note: str = "") -> Device:
    """This machine's CPU: one device, whatever its cores.

    Args:
        note: why the CPU and not a GPU.
    """
    return Device(kind="cpu", name=cpu_name(), memory_bytes=memory_limit(), note=note)


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


def _physical() -> int | None:
    """Bytes of memory in the machine; None where POSIX's names for it are unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _cgroup_limit(proc: Path, cgroups: Path) -> int | None:
    """The tightest limit of this process's cgroup and its ancestors, version 2 and 1."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return None
    limits = []
    for line in lines:
        # hierarchy:controllers:path; version 2 has an empty list of controllers
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            limits += _limits(cgroups, path, "memory.max")
            # both versions mounted at once: systemd's hybrid layout
            limits += _limits(cgroups / "unified", path, "memory.max")
        elif "memory" in controllers.split(","):
            limits += _limits(cgroups / "memory", path, "memory.limit_in_bytes")
    return min(limits, default=None)


def _limits(root: Path, path: str, file: str) -> list[int]:
    """Limits in `file` from the cgroup at `path` up to `root`.

    Inside a container `path` may be the host's and not exist here; the root is then the
    container's. Version 1 writes about 2**63 for "no limit", which is more than any machine has.
    """
    folder = root / path.strip().lstrip("/")
    limits = []
    for place in (folder, *folder.parents):
        with suppress(OSError, ValueError):  # not here, or "max"
            limits.append(int((place / file).read_text()))
        if place == root:
            break
    return limits
