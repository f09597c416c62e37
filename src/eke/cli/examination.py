"""Everything `eke doctor` looks at, gathered; what it finds is facts, not opinions."""

import contextlib
import os
import platform
import shlex
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eke.cli.probe_options import OptionFinding, find_options
from eke.cli.torch_probe import TorchProbe
from eke.common.paths import user_path
from eke.hardware import Device, detect, usable_cores
from eke.hardware.cpu import cpu_name, memory_limit
from eke.hardware.environment import PACKAGES
from eke.hardware.fingerprint import installed_versions
from eke.hardware.gpus import GpuReport, report_gpus
from eke.rules.credentials import has_wandb_key

WANTED = (*PACKAGES, "datasets", "nvidia-ml-py")
"""Packages to look for, by distribution name."""

COMPILERS = ("g++", "clang++", "c++")
"""C++ compilers in the order in which inductor and torch's extensions look for them."""


@dataclass(frozen=True)
class Examination:
    """What was found."""

    os: str
    python: str
    versions: dict[str, str]
    """Package -> version, of those that are installed."""
    missing: tuple[str, ...]
    """Packages that some option needs, or most people want, and that are not installed."""
    cpu: str
    num_cores: int
    """Cores this process may use."""
    num_machine_cores: int | None
    memory_bytes: int | None
    """What this process may use, a container's limit included."""
    compiler: str | None
    runs: str
    """Folder that runs would go into."""
    runs_free_bytes: int | None
    runs_writable: bool
    runs_risks: tuple[str, ...]
    """What others may do to the runs there."""
    wandb_key: bool
    """Whether W&B would find an API key; it is never shown."""
    gpus: GpuReport
    device: Device
    """What hardware=auto would train on."""
    torch: dict[str, Any]
    """What torch itself says, or `error`."""
    options: tuple[OptionFinding, ...]


def examine(probe: Callable[[], TorchProbe] = TorchProbe) -> Examination:
    """Look at this machine; never raises for what is missing on it.

    Args:
        probe: starts the process that asks torch; the rest is looked at in the meantime.
    """
    asked = probe()
    device = detect()
    options = find_options(device)
    versions = installed_versions(WANTED)
    runs, folder = _runs_folder()
    return Examination(
        os=platform.platform(),
        python=platform.python_version(),
        versions=versions,
        missing=tuple(name for name in WANTED if name not in versions),
        cpu=cpu_name(),
        num_cores=usable_cores(),
        num_machine_cores=os.cpu_count(),
        memory_bytes=memory_limit(),
        compiler=next((path for name in COMPILERS if (path := shutil.which(name))), None),
        runs=str(runs),
        runs_free_bytes=_free(folder),
        runs_writable=os.access(folder, os.W_OK),
        runs_risks=tuple(find_risks(runs)),
        wandb_key=has_wandb_key(),
        gpus=report_gpus(),
        device=device,
        torch=asked.answer(),
        options=options,
    )


def _runs_folder() -> tuple[Path, Path]:
    """Where runs go by default, and the nearest folder above it that exists."""
    runs = user_path("runs")
    return runs, next(place for place in (runs, *runs.parents) if place.exists())


def find_risks(runs: Path) -> Iterator[str]:
    """What other users of the machine may do to runs in a folder, and what prevents it."""
    me = os.geteuid()
    if me == 0:
        yield "you are root: eke then trusts links and folders of every user; train as another user"
    try:
        mode, found = runs.stat().st_mode, list(os.scandir(runs))
    except OSError:
        return
    if mode & 0o022 and not mode & stat.S_ISVTX:
        fix = f"chmod +t {shlex.quote(str(runs))}"
        yield f"others may rename and delete your runs in {runs}, since it has no sticky bit: {fix}"
    owners = set()
    for entry in found:
        with contextlib.suppress(OSError):
            owners.add(entry.stat(follow_symlinks=False).st_uid)
    if others := ", ".join(map(str, sorted(owners - {me}))):
        yield f"{runs} has folders of other users (uid {others}), which your runs cannot continue"


def _free(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None
