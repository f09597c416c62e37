"""Numbers of committed records, found by `results/FILE.json#/path/to/number`."""

import ast
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from reference.claims import Evidence
from support import REPO

UNITS: dict[str, Callable[[float], str]] = {
    "": lambda x: f"{x:.3g}",
    "bytes": lambda x: f"{x:.3g} bytes",
    "MiB": lambda x: f"{x / 2**20:.1f} MiB",
    "MB": lambda x: f"{x:.0f} MB",
    "%": lambda x: f"{100 * x:.3g} %",
    "ms": lambda x: f"{x:.3g} ms",
    "times": lambda x: f"x {x:.2f}",
}
"""How a number of a record is shown."""


@dataclass(frozen=True)
class Provenance:
    """Where and when a record was made."""

    machine: str
    date: str
    libraries: str


def number_at(pointer: str) -> float:
    """The number that a pointer names.

    Raises:
        KeyError: there is no such file or place, or no number there.
    """
    file, _, path = pointer.partition("#/")
    value: Any = record(file)
    for part in path.split("/"):
        value = _step(value, part, pointer)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise KeyError(f"{pointer} is no number: {value!r}")
    return float(value)


def _step(value: Any, part: str, pointer: str) -> Any:
    key, _, wanted = part.partition("=")
    if isinstance(value, dict) and part in value:
        return value[part]
    if isinstance(value, list) and part.isdigit() and int(part) < len(value):
        return value[int(part)]
    if isinstance(value, list):
        found = [each for each in value if str(each.get(key)) == wanted]
        if len(found) == 1:
            return found[0]
    raise KeyError(f"{pointer}: no {part!r}")


@cache
def record(file: str) -> Any:
    """A committed record.

    Raises:
        KeyError: there is none of that name.
    """
    path = REPO / file
    if path.parent != REPO / "results" or not path.is_file():
        raise KeyError(f"{file} is no committed record")
    return json.loads(path.read_text())


def shown(evidence: Evidence) -> str:
    """A number with its label, and the one it is compared with."""
    say = UNITS[evidence.unit]
    text = f"{evidence.label} {say(number_at(evidence.record))}"
    if evidence.over:
        text += f" against {say(number_at(evidence.over))}"
    return text


def is_a_test(name: str) -> bool:
    """Whether `tests/FILE.py::NAME` is a test that pytest would collect."""
    file, _, function = name.partition("::")
    path: Path = REPO / file
    if not (file.startswith("tests/") and path.is_file() and function.startswith("test_")):
        return False
    found = ast.walk(ast.parse(path.read_text()))
    return any(isinstance(node, ast.FunctionDef) and node.name == function for node in found)


def provenance(file: str) -> Provenance:
    """Machine, date and libraries of a record, as far as it says so."""
    content = record(file)
    where = content.get("environment", {})
    hardware = content.get("hardware", {})
    machine = hardware.get("device") or hardware.get("cpu") or content.get("device") or "no GPU"
    if cores := hardware.get("cores"):
        machine += f", {cores} cores"
    times = [row["time"] for row in content.get("outcomes", {}).values() if "time" in row]
    date = where.get("time") or content.get("date") or max(times, default="")
    versions = where.get("versions") or content.get("versions", {})
    names = [f"{name} {versions[name]}" for name in ("torch", "transformers") if name in versions]
    return Provenance(machine, date[:10], ", ".join(names))
