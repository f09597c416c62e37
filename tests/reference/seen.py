"""Where each option has been seen running: the records that benchmarks/techniques.py wrote."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Seen:
    """One file of records: a machine and what ran there."""

    device: str
    """`CPU`, or the GPU's name."""
    versions: dict[str, str]
    outcomes: dict[str, dict[str, Any]]
    """`group=option` -> its record, as benchmarks/techniques.py writes it."""

    def ran(self, command: str) -> bool:
        """Whether a run with this option ended well there."""
        return self.outcomes.get(command, {}).get("outcome") == "ok"


def read_seen(folder: Path) -> list[Seen]:
    """Every `techniques_*.json`, CPUs first."""
    found = []
    for file in sorted(folder.glob("techniques_*.json"), key=lambda f: ("cpu" not in f.name, f)):
        content = json.loads(file.read_text())
        found.append(Seen(content["device"], content["versions"], content["outcomes"]))
    return found


def describe(command: str, seen: list[Seen]) -> str:
    """`ran on CPU`, `ran on CPU, NVIDIA H200`, or `never seen running`."""
    devices = [each.device for each in seen if each.ran(command)]
    return f"ran on {', '.join(devices)}" if devices else "never seen running"
