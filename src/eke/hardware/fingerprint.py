"""Software and machine fingerprint of a measurement, and environment of its record."""

import contextlib
import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from eke.hardware import nvidia
from eke.hardware.cpu import torch_build
from eke.hardware.datasheets import Device

LIBRARIES = (
    "torch", "triton", "transformers", "accelerate", "deepspeed", "peft", "bitsandbytes", "torchao",
    "galore-torch", "apollo-torch", "schedulefree", "liger-kernel", "flash-attn", "flash-attn-3",
    "apex",
)  # fmt: skip
"""Distributions used in a step. Another version may change results, time or memory."""

_OF_DATA = ("numpy", "tokenizers")
"""Distributions that affect the input of a step, but not its time."""


def machine_fingerprint(device: Device) -> dict[str, str]:
    """Return the facts that must be equal before a record of another run is reused."""
    return {"device": device.name, "device_count": str(device.count), **_software()}


def software_now() -> dict[str, str]:
    """Return the software part of a fingerprint from the files on disk."""
    return {
        "python": platform.python_version(),
        "eke_source": source_hash(package_folder()),
        **installed_versions((*LIBRARIES, *_OF_DATA)),
    }


def software_places() -> dict[str, tuple[str, int]]:
    """Return folder and inode of each part of `software_now`, which upgrades do not change."""
    folders = {"eke_source": str(package_folder().parent), "python": sys.prefix}
    for name in (*LIBRARIES, *_OF_DATA):
        with contextlib.suppress(metadata.PackageNotFoundError):
            folders[name] = os.path.realpath(str(metadata.distribution(name).locate_file("")))
    return {name: (folder, os.stat(folder).st_ino) for name, folder in folders.items()}


_software = cache(software_now)
"""Cached `software_now`: imported code does not change, and reading takes a tenth of a second."""


def package_folder() -> Path:
    """Return the folder of the imported package eke."""
    return Path(__file__).resolve().parents[1]


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of installed distributions by name."""
    versions = {}
    for name in names:
        # Suppressed: not installed, or broken metadata.
        with contextlib.suppress(metadata.PackageNotFoundError, KeyError, OSError, ValueError):
            versions[name] = str(metadata.version(name) or "")
    return {name: version for name, version in versions.items() if version}


def source_hash(package: Path) -> str:
    """Hash the sorted relative paths and contents of `**/*.py` to 16 hex digits."""
    digest = hashlib.sha256()
    files = {path.relative_to(package).as_posix(): path for path in package.rglob("*.py")}
    for name, path in sorted(files.items()):
        try:
            content = path.read_bytes()
        except OSError as error:  # for example a dangling link of an editor
            content = type(error).__name__.encode()
        # Lengths delimit path and content.
        digest.update(f"{len(name)}:{name}:{len(content)}:".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


PACKAGES = (
    "eke", *LIBRARIES, "tokenizers", "safetensors", "numpy", "hydra-core", "omegaconf", "wandb",
)  # fmt: skip
"""Distributions that may affect results or speed."""


def environment() -> dict[str, Any]:
    """Return time (UTC, ISO 8601), host, software and scheduler; unknown values are absent."""
    drivers, _ = nvidia.ask_driver(nvidia.driver_versions)
    driver, cuda_driver = drivers or (None, None)
    known: dict[str, Any] = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "os": platform.platform(),
        "python": platform.python_version(),
        "versions": installed_versions(PACKAGES),
        "git": git_state(package_folder()),
        "driver": driver,
        "cuda_driver": cuda_driver,
        "cuda_torch": build.cuda if (build := torch_build()) else None,
        "slurm_job_id": slurm_job_id(os.environ),
    }
    return {key: value for key, value in known.items() if value}


def slurm_job_id(variables: Mapping[str, str]) -> str | None:
    """Return the SLURM job as in sacct: `4711`, `4711_3` in an array, None without a job."""
    array, task = variables.get("SLURM_ARRAY_JOB_ID"), variables.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else variables.get("SLURM_JOB_ID")


def git_state(package: Path) -> dict[str, Any] | None:
    """Return commit and dirty flag of the checkout of `package`, None without a checkout."""
    # A virtual environment may be inside the checkout of another project.
    checkout = package.parents[1]
    if package.parent.name != "src" or not (checkout / ".git").exists():
        return None
    # In a git hook GIT_DIR is another repository. Optional locks would block the user's git.
    variables = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", str(checkout), "status", "--porcelain=v2", "--branch"],
            env={**variables, "GIT_OPTIONAL_LOCKS": "0"}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, errors="replace", check=True,
            timeout=5.0,  # a hung shared file system must not block a run
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.splitlines()
    commit = next((line.split()[-1] for line in lines if line.startswith("# branch.oid ")), "")
    if not commit or commit == "(initial)":
        return None
    return {"commit": commit, "dirty": any(not line.startswith("#") for line in lines)}
