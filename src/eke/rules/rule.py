"""What a rule is: data, so that it can be listed, documented and switched off by a test.

Numeric limits of single keys, read from the schema's field metadata.

What rules say about a device's generation, and about the compiler that generated code needs.
"""

import copy
import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from eke.common.errors import Fix, Problem
from eke.common.text import format_value
from eke.config.schema import Config, Limit
from eke.hardware import Device


class Verdict(Enum):
    """What follows when a rule's condition holds."""

    impossible = "impossible"
    """Cannot run, or would run as something else: refused."""
    unsafe = "unsafe"
    """Runs, and may go wrong: warned about."""
    no_effect = "no effect"
    """Runs as if it had not been asked for: warned about."""
    no_benefit = "no benefit"
    """Runs as asked for, and saves nothing, or less than it could: warned about."""


@dataclass(frozen=True)
class Facts:
    """All that rules may look at."""

    config: Config
    device: Device
    planning: bool = False
    """Only a plan is wanted: nothing will be run here."""
    num_nodes: int = 1
    """Machines that this command can use."""


@dataclass(frozen=True)
class Rule:
    """One known incompatibility."""

    id: str
    verdict: Verdict
    key: str
    """Key path the problem is shown under."""
    when: Callable[[Facts], bool]
    """Condition; numbers are within their limits when it is asked."""
    value: Callable[[Facts], object]
    """The offending value."""
    why: Callable[[Facts], str]
    """The limit that is broken, with its number."""
    fix: Callable[[Facts], Fix]
    """The overrides that correct it."""
    source: str
    """Where this is known from: a URL, or the formula it follows from."""
    versions: str = ""
    """Library versions it holds for; empty when it does not depend on any."""
    sized: bool = False
    """Needs the size of the model: looked at only when nothing else is impossible."""
    passing: bool = False
    """Says what the machine is short of at the moment, and nothing about what was typed."""

    def problem(self, facts: Facts) -> Problem:
        """The rule's finding, for a person."""
        value = format_value(self.value(facts))
        return Problem(self.key, value, self.why(facts), self.fix(facts), self.id, self.passing)


def find_limit_problems(config: Config) -> list[Problem]:
    """Every value outside its limits; the fix is the key's default, or null."""
    return list(_walk(config, ""))


def with_defaults_for(config: Config, problems: list[Problem]) -> Config:
    """A copy with the default in place of every value that is outside its limits.

    So that the other rules can be asked in the same breath, without stumbling over a width of -1.
    """
    mended = copy.deepcopy(config)
    for problem in problems:
        *groups, key = problem.key.split(".")
        node: Any = mended
        for group in groups:
            node = getattr(node, group)
        default = next(f.default for f in dataclasses.fields(node) if f.name == key)
        setattr(node, key, default)
    return mended


def _walk(node: Any, prefix: str) -> Iterator[Problem]:
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        path = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from _walk(value, f"{path}.")
            continue
        limit = field.metadata.get("limit")
        if isinstance(limit, Limit) and value is not None and not limit.admits(value):
            instead = format_value(limit.in_place_of(value, field.default))
            yield Problem(
                path,
                format_value(value),
                f"must be {limit.describe(value)}",
                Fix(f"{path}={instead}"),
                "limit",
            )


def capability_of(facts: Facts) -> str:
    """The device's CUDA compute capability, as a clause."""
    device = facts.device
    if device.capability is None:
        return f"{device.name} is a CPU"
    major, minor = device.capability
    return f"{device.name} has compute capability {major}.{minor}"


def older_than(facts: Facts, needed: tuple[int, int]) -> bool:
    """Whether the device is a GPU of an earlier generation."""
    return facts.device.kind == "cuda" and (facts.device.capability or (0, 0)) < needed


def lacks_compiler(facts: Facts) -> bool:
    """Whether what is generated for the device cannot be compiled here.

    For a CPU inductor writes C++. For a GPU Triton writes machine code itself, but compiles the C
    of its driver at first use (3.9, backends/nvidia/driver.py).
    """
    if facts.planning or not facts.device.present:
        return False
    if facts.device.kind == "cpu":
        return not _found("g++", "clang++", "c++")
    return "CC" not in os.environ and not _found("gcc", "clang")


def without_compiler(facts: Facts) -> str:
    """What is missing then, as a clause."""
    if facts.device.kind == "cpu":
        return "no C++ compiler was found, and for a CPU inductor generates C++"
    return "no C compiler was found (CC, gcc, clang), and Triton compiles its driver by one"


def with_compiler(facts: Facts) -> str:
    """The remark that tells how to install it."""
    return f"or: apt install {'g++' if facts.device.kind == 'cpu' else 'gcc'}"


def _found(*names: str) -> bool:
    return any(shutil.which(name) for name in names)
