"""The guides' table measured with eke: the records that benchmarks/on_gpu.py wrote."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Measured:
    """One device's records of the rows."""

    device: str
    rows: dict[str, dict[str, Any]]
    """Technique, as in `reference.published.ROWS` -> its record."""


def read_measured(folder: Path) -> list[Measured]:
    """Every full-size `on_gpu_*.json`; what ran in miniature has measured nothing."""
    found = []
    for file in sorted(folder.glob("on_gpu_*.json")):
        content = json.loads(file.read_text())
        if content["size"] == "full" and content["parts"]["memory"]:
            found.append(Measured(content["device"], content["parts"]["memory"]))
    return found


def cell(row: dict[str, Any] | None) -> str:
    """Samples per second and the whole GPU's memory as the guides count it, or why there are none.

    A device that others used makes no speed claim.
    """
    if row is None:
        return "not measured"
    if row["outcome"] != "ok":
        return str(row["outcome"])
    words = []
    if row["samples_per_s"] and not row["shared_device"]:
        words.append(f"{row['samples_per_s']:.2f}/s")
    used = (row["stages"] or {}).get("training")
    words += [f"{used / 2**20:.0f} MB"] if used else []  # NVML's and the guides' MB are MiB
    return ", ".join(words)
