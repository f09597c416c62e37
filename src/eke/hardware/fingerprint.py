"""What a measurement depends on besides its configuration: device, libraries, eke's own source."""

import hashlib
import platform
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from pathlib import Path

from eke.hardware.device import Device

LIBRARIES = (
    "torch", "triton", "transformers", "accelerate", "deepspeed", "peft", "bitsandbytes", "torchao",
    "galore-torch", "apollo-torch", "schedulefree", "liger-kernel", "flash-attn", "flash-attn-3",
    "apex",
)  # fmt: skip
"""Those whose code a step may run through, by distribution name: another version of one of them may
compute something else, take another time or other memory."""


def machine_fingerprint(device: Device) -> dict[str, str]:
    """Facts that must agree before another run's record is taken for this one's; never raises.

    Returns:
        `device`, `device_count`, `python`, `eke_source` (16 hex digits) and the version of each
        library that is installed.
    """
    return {
        "device": device.name,
        "device_count": str(device.count),
        "python": platform.python_version(),
        **_software(),
    }


@cache
def _software() -> dict[str, str]:
    """What a process has imported stays; looking again costs a tenth of a second for each run."""
    return {"eke_source": source_hash(package_folder()), **installed_versions(LIBRARIES)}


def package_folder() -> Path:
    """The folder eke's own modules are imported from."""
    return Path(__file__).resolve().parents[1]


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """Version by distribution name, in the order given; those not installed are absent."""
    versions = {}
    for name in names:
        try:
            version = metadata.version(name)
        except (metadata.PackageNotFoundError, KeyError, OSError, ValueError):
            continue  # not there, or its metadata is broken
        if version:
            versions[name] = str(version)
    return versions


def source_hash(package: Path) -> str:
    """First 16 hex digits of SHA-256 over the sorted relative paths and contents of `**/*.py`."""
    digest = hashlib.sha256()
    files = {path.relative_to(package).as_posix(): path for path in package.rglob("*.py")}
    for name, path in sorted(files.items()):
        try:
            content = path.read_bytes()
        except OSError as error:  # a dangling editor link must not stop a run
            content = type(error).__name__.encode()
        # lengths keep (path, content) pairs apart: moving a byte between them changes the hash
        digest.update(f"{len(name)}:{name}:{len(content)}:".encode())
        digest.update(content)
    return digest.hexdigest()[:16]
