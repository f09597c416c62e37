"""Where and when a run took place: for its record only, never for its identity."""

import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from eke.hardware import nvml
from eke.hardware.fingerprint import LIBRARIES, installed_versions, package_folder
from eke.hardware.torch_build import torch_build

PACKAGES = (
    "eke", *LIBRARIES, "tokenizers", "safetensors", "numpy", "hydra-core", "omegaconf", "wandb",
)  # fmt: skip
"""What a run's result or speed may depend on, by distribution name."""
_GIT_TIMEOUT_S = 5.0
"""A status takes milliseconds; a shared file system that hangs must not hold up a run."""


def environment() -> dict[str, Any]:
    """Time, host, software and scheduler of this process; what is not known is absent.

    Returns:
        `time` (UTC, ISO 8601), `host`, `os`, `python`, `versions`; and where they exist `git`
        (`commit`, `dirty`), `driver`, `cuda_driver`, `cuda_torch`, `slurm_job_id`. JSON-ready.
    """
    known: dict[str, Any] = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "os": platform.platform(),
        "python": platform.python_version(),
        "versions": installed_versions(PACKAGES),
        "git": git_state(package_folder()),
        **_driver(),
        "cuda_torch": build.cuda if (build := torch_build()) else None,
        "slurm_job_id": slurm_job_id(os.environ),
    }
    return {key: value for key, value in known.items() if value}


def slurm_job_id(variables: Mapping[str, str]) -> str | None:
    """The job as sacct names it: `4711`, or `4711_3` for an element of an array; None outside."""
    array, task = variables.get("SLURM_ARRAY_JOB_ID"), variables.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else variables.get("SLURM_JOB_ID")


def git_state(package: Path) -> dict[str, Any] | None:
    """Commit and dirty flag of the checkout whose `src/eke` is `package`.

    Returns:
        None when `package` is installed elsewhere (a virtual environment may lie inside some other
        project's checkout, whose commit would be a lie), has no commit yet, or git does not answer.
    """
    checkout = package.parents[1]
    if package.parent.name != "src" or not (checkout / ".git").exists():
        return None
    # Inside a git hook GIT_DIR and its like name another repository; locks would disturb the user.
    variables = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", str(checkout), "status", "--porcelain=v2", "--branch"],
            env={**variables, "GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.splitlines()
    commit = next((line.split()[-1] for line in lines if line.startswith("# branch.oid ")), "")
    if not commit or commit == "(initial)":
        return None
    return {"commit": commit, "dirty": any(not line.startswith("#") for line in lines)}


def _driver() -> dict[str, str]:
    """NVIDIA driver and the newest CUDA it supports, as far as NVML answers."""
    known: dict[str, str] = {}
    with nvml.session() as (library, _):
        if library is None:
            return known
        try:
            known["driver"] = str(library.nvmlSystemGetDriverVersion())
            # 13010 is CUDA 13.1
            number = int(library.nvmlSystemGetCudaDriverVersion_v2())
            known["cuda_driver"] = f"{number // 1000}.{number % 1000 // 10}"
        except library.NVMLError:
            pass
    return known
