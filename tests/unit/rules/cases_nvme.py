"""Cases of rules/deepspeed.py: the command and the device that break each rule."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from unit.rules.devices import CPU

from eke.hardware import Device

DISK = ("distributed=zero3", "offload=nvme", "offload.path={tmp}/disk")

CASES: dict[str, tuple[tuple[str, ...], Device]] = {
    "nvme_holds_plain_state": ((*DISK, "optimizer=adamw_8bit"), CPU),
    "nvme_weights_stay_in_memory": ((*DISK, "offload.weights=disk"), CPU),
    "nvme_folder_writable": ((*DISK[:2], "offload.path={tmp}/a.txt/disk"), CPU),
    "nvme_folder_is_a_disk": (DISK, CPU),
    "nvme_folder_is_local": (DISK, CPU),
    "nvme_has_space": (DISK, CPU),
    "nvme_state_is_large": ((*DISK, "model.hidden_size=32"), CPU),
    "nvme_buffers_are_locked": (DISK, CPU),
    "nvme_needs_libaio": (DISK, CPU),
}

FAKES: dict[str, tuple[str, Any]] = {
    "nvme_holds_plain_state": ("lockable_bytes", lambda: None),
    "nvme_weights_stay_in_memory": ("lockable_bytes", lambda: None),
    "nvme_folder_writable": ("has_libaio_header", lambda flags: True),
    "nvme_folder_is_a_disk": ("file_system", lambda path: "tmpfs"),
    "nvme_folder_is_local": ("file_system", lambda path: "nfs4"),
    "nvme_has_space": (
        "shutil",
        SimpleNamespace(disk_usage=lambda path: SimpleNamespace(free=5), which=shutil.which),
    ),
    "nvme_state_is_large": ("lockable_bytes", lambda: None),
    "nvme_buffers_are_locked": ("lockable_bytes", lambda: 65536),
    "nvme_needs_libaio": ("has_libaio_header", lambda flags: False),
}
"""What the machine is to look like; else as if it had a disk, libaio and no limit."""


def prepare(rule: str, tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has all that is needed, but for what this rule is about."""
    module = "eke.rules.deepspeed"
    monkeypatch.setattr(f"{module}.has_libaio_header", lambda flags: True)
    monkeypatch.setattr(f"{module}.file_system", lambda path: "ext4")
    monkeypatch.setattr(f"{module}.lockable_bytes", lambda: None)
    name, value = FAKES[rule]
    monkeypatch.setattr(f"{module}.{name}", value)


PREPARE: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    rule: partial(prepare, rule) for rule in CASES
}

FIX_IS_WORDS: set[str] = set(CASES) - {"nvme_weights_stay_in_memory"}
"""A path only the user knows; and without offload=nvme there is no key offload.path to be kept."""
