"""Rules as data, so that they can be listed, documented and disabled in tests."""

import copy
import functools
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from eke.common.errors import Fix, Problem
from eke.common.text import format_value
from eke.config.schema import Config, Data, Distributed
from eke.hardware import Device
from eke.models.families import Family, family_of
from eke.models.sizes import OptimizerEntry, optimizer_entry

VOLTA, AMPERE, ADA = (7, 0), (8, 0), (8, 9)
"""CUDA compute capabilities: tensor cores and Triton / bfloat16, TF32 and A100 / float8."""


class Severity(Enum):
    """Consequence of a rule whose condition holds."""

    impossible = "impossible"
    """The configuration cannot run, or would run as another one: rejected."""
    unsafe = "unsafe"
    """The run may fail or diverge: a warning."""
    no_effect = "no effect"
    """The setting is ignored: a warning."""
    no_benefit = "no benefit"
    """The setting has little or no benefit: a warning."""


@dataclass(frozen=True)
class RuleInputs:
    """Inputs of all rules."""

    config: Config
    device: Device
    planning: bool = False
    num_nodes: int = 1
    is_set: Callable[[str], bool] = lambda key: False
    """True if the user set a key. Default: false for all keys."""

    @property
    def data(self) -> Data:
        """Configuration of the training data."""
        return self.config.data

    @property
    def distributed(self) -> Distributed:
        """Configuration of processes and sharding."""
        return self.config.distributed

    @property
    def on_cpu(self) -> bool:
        """True if the run uses a CPU."""
        return self.device.kind == "cpu"

    @property
    def on_cuda(self) -> bool:
        """True if the run uses CUDA."""
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
    """One rule about a configuration."""

    id: str = ""
    """Key in the topic's `RULES`."""
    verdict: Severity = Severity.impossible
    key: str
    when: Callable[[RuleInputs], object]
    """Condition, evaluated with all numbers within their limits."""
    value: Callable[[RuleInputs], object] | None = None
    """The invalid value. None: the value of the key."""
    why: Callable[[RuleInputs], str] | str
    """The violated limit, with its number."""
    fix: Callable[[RuleInputs], Fix] | Fix | None = None
    """Overrides that correct the configuration. None: the default of the key or group."""
    source: str
    """Evidence: a URL, or the formula the rule follows from."""
    versions: str = ""
    sized: bool = False
    """True if the condition needs the model's size. Such rules run only if no other rule fails."""
    passing: bool = False
    """True if the cause is the present state of the machine, not the configuration."""

    def problem(self, facts: RuleInputs) -> Problem:
        """Return the problem to report."""
        value = self.value(facts) if self.value else configured(facts.config, self.key)
        why = self.why if isinstance(self.why, str) else self.why(facts)
        fix = self.fix(facts) if callable(self.fix) else self.fix or _reset(facts.config, self.key)
        return Problem(self.key, format_value(value), why, fix, self.id, self.passing)


unsafe = functools.partial(Rule, verdict=Severity.unsafe)
without_benefit = functools.partial(Rule, verdict=Severity.no_benefit)


def configured(config: Config, key: str) -> Any:
    """Return the value of a key, or the option of a group, as on the command line."""
    value: Any = functools.reduce(getattr, key.split("."), config)
    if isinstance(value, Enum):
        return value.value
    return value.option if hasattr(value, "option") else value


def if_changed(*, key: str, when: Callable[[RuleInputs], object], **rest: Any) -> Rule:
    """Return a rule that only holds for another value of the key than its default."""

    def holds(facts: RuleInputs) -> object:
        group, _, name = key.partition(".")
        section = getattr(facts.config, group)
        value = getattr(section, name or "option", None)  # an option may lack the key
        return value != _default(facts.config, key) and when(facts)

    return Rule(key=key, when=holds, **rest)


without_effect = functools.partial(if_changed, verdict=Severity.no_effect)


def _default(config: Config, key: str) -> Any:
    """Return the default of a key or the option of a group, None without one."""
    group, _, name = key.partition(".")
    return getattr(type(getattr(config, group)), name or "option", None)


def _reset(config: Config, key: str) -> Fix:
    default = _default(config, key)
    return Fix(f"{key}={format_value(default.value if isinstance(default, Enum) else default)}")


def with_defaults_for(config: Config, problems: list[Problem]) -> Config:
    """Return a copy with the default for each value outside its limits."""
    # The other rules can then be evaluated without failing on a width of -1.
    corrected = copy.deepcopy(config)
    for problem in problems:
        *groups, key = problem.key.split(".")
        node: Any = functools.reduce(getattr, groups, corrected)
        setattr(node, key, getattr(type(node), key))
    return corrected


def instead_of(options: tuple[str, ...], option: str, key: str) -> Callable[[RuleInputs], Fix]:
    """Return a fix: `option` if `precision` has one of these options, else the override `key`."""
    return lambda facts: Fix(option if facts.config.precision.option in options else key)


def capability_of(facts: RuleInputs) -> str:
    """Return a clause about the device's CUDA compute capability."""
    device = facts.device
    if device.capability is None:
        return f"{device.name} is a CPU"
    return "{} has compute capability {}.{}".format(device.name, *device.capability)


def needs_capability(what: str, needed: tuple[int, int]) -> Callable[[RuleInputs], str]:
    """Return the reason for a GPU that is too old. `what` is subject and verb."""
    wanted = "{} CUDA compute capability {}.{} or newer".format(what, *needed)
    return lambda facts: f"{wanted}. {capability_of(facts)}"


def older_than(facts: RuleInputs, needed: tuple[int, int]) -> bool:
    """Return whether the device is a GPU below this compute capability."""
    return facts.on_cuda and (facts.device.capability or (0, 0)) < needed


def _lacks_compiler(facts: RuleInputs) -> bool:
    """Return whether the compiler for generated code is missing here."""
    # For a CPU inductor writes C++. For a GPU Triton writes machine code itself, but compiles the C
    # of its driver at first use (3.9, backends/nvidia/driver.py).
    if facts.planning or not facts.device.present:
        return False
    names = ("g++", "clang++", "c++") if facts.on_cpu else ("gcc", "clang")
    return (facts.on_cpu or "CC" not in os.environ) and not any(map(shutil.which, names))


def needs_compiler(
    key: str, is_on: Callable[[RuleInputs], bool], instead: Fix, source: str,
    versions: str = "", use: Callable[[RuleInputs], str] = lambda facts: "",
) -> Rule:  # fmt: skip
    """Return the rule that a C or C++ compiler is installed. `use` begins the message."""
    on_cpu = "no C++ compiler found. inductor needs one for a CPU"
    on_gpu = "no C compiler found (CC, gcc, clang). Triton needs one for its driver"
    return Rule(
        key=key,
        when=lambda f: is_on(f) and _lacks_compiler(f),
        why=lambda f: use(f) + (on_cpu if f.on_cpu else on_gpu),
        fix=lambda f: Fix(*instead.words, remark=f"or: apt install {'g++' if f.on_cpu else 'gcc'}"),
        source=source,
        versions=versions,
    )
