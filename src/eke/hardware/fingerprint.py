"""What a measurement depends on besides its configuration: device, libraries, eke's own source."""

import contextlib
import hashlib
import os
import platform
import sys
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

OF_DATA = ("numpy", "tokenizers")
"""Those that decide what a step is given, and not how long it takes."""


def machine_fingerprint(device: Device) -> dict[str, str]:
    """Facts that must agree before another run's record is taken for this one's; never raises.

    Returns:
        `device`, `device_count`, `python`, `eke_source` (16 hex digits) and the version of each
        library that is installed.
    """
    return {
        "device": device.name,
        "device_count": str(device.count),
        **_software(),
    }


def software_now() -> dict[str, str]:
    """The part of a fingerprint that is no device, as it is on disk now."""
    return {
        "python": platform.python_version(),
        "eke_source": source_hash(package_folder()),
        **installed_versions((*LIBRARIES, *OF_DATA)),
    }


def software_places() -> dict[str, tuple[str, int]]:
    """Folder and its number, which an upgrade leaves as they are, of each part of `software_now`.

    A fingerprint that changes in one place is a change; in another place it is other software.
    """
    folders = {"eke_source": str(package_folder().parent), "python": sys.prefix}
    for name in (*LIBRARIES, *OF_DATA):
        with contextlib.suppress(metadata.PackageNotFoundError):
            folders[name] = os.path.realpath(str(metadata.distribution(name).locate_file("")))
    return {name: (folder, os.stat(folder).st_ino) for name, folder in folders.items()}


_software = cache(software_now)
"""What a process has imported stays; looking again costs a tenth of a second for each run."""


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
