"""Rules as data, so that they can be listed, documented and disabled in a test."""

import copy
import dataclasses
import functools
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from eke.common.errors import Fix, Problem
from eke.common.text import format_value
from eke.config.schema import Config, Data, Limit
from eke.config.schema.resources import Distributed
from eke.hardware import Device
from eke.models.families import Family, family_of
from eke.models.sizes import OptimizerEntry, optimizer_entry

VOLTA, AMPERE, ADA = (7, 0), (8, 0), (8, 9)
"""CUDA compute capabilities: tensor cores and Triton; bfloat16, TF32 and A100; float8."""


class Severity(Enum):
    """The consequence when a rule's condition holds."""

    impossible = "impossible"
    """Cannot run, or would run as something else: rejected."""
    unsafe = "unsafe"
    """Runs, but may fail or diverge: a warning."""
    no_effect = "no effect"
    """Runs as if it were not set: a warning."""
    no_benefit = "no benefit"
    """Takes effect, but saves nothing, or less than it could: a warning."""


@dataclass(frozen=True)
class Facts:
    """The inputs of all rules."""

    config: Config
    device: Device
    planning: bool = False
    """Only a plan is made; nothing runs here."""
    num_nodes: int = 1
    """Number of machines that the run can use."""
    is_set: Callable[[str], bool] = lambda key: False
    """Whether the user set a key path; by default nothing counts as set."""

    @property
    def data(self) -> Data:
        """What is trained on."""
        return self.config.data

    @property
    def distributed(self) -> Distributed:
        """Processes, and how they share the model."""
        return self.config.distributed

    @property
    def on_cpu(self) -> bool:
        """Whether the run is for a CPU."""
        return self.device.kind == "cpu"

    @property
    def on_cuda(self) -> bool:
        """Whether the run is for GPUs with CUDA."""
        return self.device.kind == "cuda"

    @property
    def model_family(self) -> Family:
        """Record of the model's family."""
        return family_of(self.config)

    @property
    def optimizer(self) -> OptimizerEntry:
        """Record of the optimizer."""
        return optimizer_entry(self.config.optimizer)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One known incompatibility."""

    id: str
    verdict: Severity = Severity.impossible
    key: str
    """Key path the problem is shown under."""
    when: Callable[[Facts], object]
    """Condition, a value that is true or not; evaluated with all numbers within their limits."""
    value: Callable[[Facts], object] | None = None
    """The offending value; None: the key's own."""
    why: Callable[[Facts], str] | str
    """The violated limit, with its number."""
    fix: Callable[[Facts], Fix] | Fix
    """The overrides that correct it."""
    source: str
    """Evidence: a URL, or the formula it follows from."""
    versions: str = ""
    """Library versions it applies to; empty for all."""
    sized: bool = False
    """Needs the size of the model: evaluated only if no other rule rejects the configuration."""
    passing: bool = False
    """About the present state of the machine, not about the configuration."""

    def problem(self, facts: Facts) -> Problem:
        """The problem that the rule reports."""
        value = self.value(facts) if self.value else configured(facts.config, self.key)
        why = self.why if isinstance(self.why, str) else self.why(facts)
        fix = self.fix if isinstance(self.fix, Fix) else self.fix(facts)
        return Problem(self.key, format_value(value), why, fix, self.id, self.passing)


unsafe = functools.partial(Rule, verdict=Severity.unsafe)
without_effect = functools.partial(Rule, verdict=Severity.no_effect)
without_benefit = functools.partial(Rule, verdict=Severity.no_benefit)


def configured(config: Config, key: str) -> Any:
    """The value of a key, or a group's option, as on the command line."""
    value: Any = functools.reduce(getattr, key.split("."), config)
    if isinstance(value, Enum):
        return value.value
    return value.option if hasattr(value, "option") else value


def with_defaults_for(config: Config, problems: list[Problem]) -> Config:
    """A copy with the default in place of every value that is outside its limits."""
    # The other rules are then evaluated at once, without failing on a width of -1.
    corrected = copy.deepcopy(config)
    for problem in problems:
        *groups, key = problem.key.split(".")
        node: Any = functools.reduce(getattr, groups, corrected)
        setattr(node, key, getattr(type(node), key))
    return corrected


def find_limit_problems(node: Any, prefix: str = "") -> Iterator[Problem]:
    """Every value outside its limits, of a configuration or of a section under `prefix`."""
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        path = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from find_limit_problems(value, f"{path}.")
            continue
        limit = field.metadata.get("limit")
        if isinstance(limit, Limit) and value is not None and not limit.admits(value):
            fix = Fix(f"{path}={format_value(limit.in_place_of(value, field.default))}")
            why = f"must be {limit.describe(value)}"
            yield Problem(path, format_value(value), why, fix, "limit")


def instead_of(options: tuple[str, ...], option: str, key: str) -> Callable[[Facts], Fix]:
    """Another option of `precision` where one of these was chosen, else the override of a key."""
    return lambda facts: Fix(option if facts.config.precision.option in options else key)


def capability_of(facts: Facts) -> str:
    """The device's CUDA compute capability, as a clause."""
    device = facts.device
    if device.capability is None:
        return f"{device.name} is a CPU"
    return "{} has compute capability {}.{}".format(device.name, *device.capability)


def needs_capability(what: str, needed: tuple[int, int]) -> Callable[[Facts], str]:
    """Why a device is too old; `what` is subject and verb."""
    wanted = "{} CUDA compute capability {}.{} or newer".format(what, *needed)
    return lambda facts: f"{wanted}; {capability_of(facts)}"


def older_than(facts: Facts, needed: tuple[int, int]) -> bool:
    """Whether the device is a GPU of an earlier generation."""
    return facts.on_cuda and (facts.device.capability or (0, 0)) < needed


def lacks_compiler(facts: Facts) -> bool:
    """Whether code generated for the device cannot be compiled here."""
    # For a CPU inductor writes C++. For a GPU Triton writes machine code itself, but compiles the C
    # of its driver at first use (3.9, backends/nvidia/driver.py).
    if facts.planning or not facts.device.present:
        return False
    names = ("g++", "clang++", "c++") if facts.on_cpu else ("gcc", "clang")
    return (facts.on_cpu or "CC" not in os.environ) and not any(map(shutil.which, names))


def needs_compiler(
    rule: str, key: str, is_on: Callable[[Facts], bool], instead: Fix, source: str,
    versions: str = "", use: Callable[[Facts], str] = lambda facts: "",
) -> Rule:  # fmt: skip
    """What generates code needs a compiler of it; `use` begins the reason."""
    on_cpu = "no C++ compiler was found, and for a CPU inductor generates C++"
    on_gpu = "no C compiler was found (CC, gcc, clang), and Triton compiles its driver by one"
    return Rule(
        id=rule,
        key=key,
        when=lambda f: is_on(f) and lacks_compiler(f),
        why=lambda f: use(f) + (on_cpu if f.on_cpu else on_gpu),
        fix=lambda f: Fix(*instead.words, remark=f"or: apt install {'g++' if f.on_cpu else 'gcc'}"),
        source=source,
        versions=versions,
    )
