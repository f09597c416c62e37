"""Which options of every group could run here: each is put to the rules that a run is put to."""

import copy
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import OmegaConf

from eke.common.errors import Problem
from eke.config.compose import compose
from eke.config.compose.catalogue import Catalogue, make_catalogue
from eke.config.schema import Config
from eke.hardware import Device
from eke.models.sizes import VALID_TASKS
from eke.rules import Facts, check

LEFT_OUT = ("data", "task", "batch", "schedule", "hardware", "recipe", "experiment", "sweep")
"""Groups that ask nothing of a machine, or that need a path nobody has typed."""

NEEDS_MORE = {("model", "pretrained")}
"""Options that say nothing without a value that only the user knows."""

EXAMPLES = {("offload", "nvme"): ("offload.path=runs",)}
"""Options that need a folder -> the one that runs go to."""

MOST_FIXES = 4
"""Rounds of typing what the rules ask for."""


@dataclass(frozen=True)
class OptionFinding:
    """What the rules say of one option on this machine, what it needs beside it typed."""

    group: str
    option: str
    usable: bool
    why: str = ""
    """The limit it breaks, or why it is unsafe or changes nothing; empty for nothing to say."""
    fix: str = ""
    beside: tuple[str, ...] = ()
    """What it needs beside it where everything else is left at its default."""


def find_options(device: Device) -> tuple[OptionFinding, ...]:
    """Every option of every group that depends on the machine.

    Some milliseconds each, and tenths of a second where something has to be typed beside it.

    Args:
        device: what would train here.
    """
    catalogue = make_catalogue()
    base = compose(["tracker=none"]).config  # whose package may be missing like any other
    # Not about the option that is asked about: a full disk, say.
    everywhere = {problem.rule for problems in _ask(base, device) for problem in problems}
    findings = []
    for group, options in catalogue.options.items():
        if group in LEFT_OUT:
            continue
        for option in options:
            if (group, option) not in NEEDS_MORE:
                findings.append(_find(catalogue, base, device, (group, option), everywhere))
    return tuple(findings)


def _find(
    catalogue: Catalogue, base: Config, device: Device, asked: tuple[str, str], everywhere: set[str]
) -> OptionFinding:
    """Type what the rules ask for, until the option may run or they ask for another one."""
    group, option = asked
    beside: tuple[str, ...] = EXAMPLES.get(asked, ())
    config = _typed(group, option, beside) if beside else _with(catalogue, base, group, option)
    finding = _finding(config, device, group, option, everywhere)
    for _ in range(MOST_FIXES):
        more = _fixes(finding)
        another = any(word.startswith((f"{group}=", f"{group}.")) for word in more)
        if finding.usable or not more or another:
            break
        beside = _last_wins((*beside, *more))
        finding = _finding(_typed(group, option, beside), device, group, option, everywhere)
    return replace(finding, beside=beside if finding.usable else ())


def _ask(config: Config, device: Device) -> tuple[list[Problem], list[Problem]]:
    return check(Facts(config, device))


def _finding(
    config: Config, device: Device, group: str, option: str, everywhere: set[str]
) -> OptionFinding:
    refused, warned = _ask(config, device)
    refused = [problem for problem in refused if problem.rule not in everywhere]
    warned = [problem for problem in warned if problem.rule not in everywhere]
    for usable, problems in ((False, refused), (True, warned)):
        if problems:
            return OptionFinding(group, option, usable, problems[0].why, problems[0].fix)
    return OptionFinding(group, option, True)


def _fixes(finding: OptionFinding) -> tuple[str, ...]:
    """The overrides of its fix, without what may be done instead; none where it is no override."""
    words = tuple(shlex.split(finding.fix.split("   (")[0]))
    return words if all("=" in word for word in words) else ()


def _last_wins(words: Iterable[str]) -> tuple[str, ...]:
    """Each key once, with what was typed last."""
    return tuple({word.partition("=")[0]: word for word in words}.values())


def _typed(group: str, option: str, beside: Iterable[str]) -> Config:
    """What is trained where somebody types this option and those words."""
    model = [f"{group}={option}"] if group == "model" else []
    tasks = VALID_TASKS[compose([*model, "tracker=none"]).config.model.family]
    chosen = _last_wins(["tracker=none", f"task={tasks[0]}", f"{group}={option}", *beside])
    return compose(chosen).config


def _with(catalogue: Catalogue, base: Config, group: str, option: str) -> Config:
    """The default configuration with another option in one group.

    Read from the option's file, without Hydra, which takes a tenth of a second to compose.
    """
    config = copy.deepcopy(base)
    setattr(config, group, _section(catalogue, group, option))
    tasks = VALID_TASKS[config.model.family]
    if config.task.option not in tasks:
        config.task = _section(catalogue, "task", tasks[0])
    return config


def _section(catalogue: Catalogue, group: str, option: str) -> Any:
    """The typed values of one option."""
    schema = OmegaConf.structured(catalogue.schema_class(group, option))
    return OmegaConf.to_object(OmegaConf.merge(schema, *_values(catalogue, group, option)))


def _values(catalogue: Catalogue, group: str, option: str) -> list[dict[str, object]]:
    """What the file of an option sets, behind those of the options it builds on."""
    content = OmegaConf.to_container(OmegaConf.load(catalogue.options[group][option]))
    assert isinstance(content, dict)
    values = {str(key): value for key, value in content.items()}
    defaults = values.pop("defaults", [])
    assert isinstance(defaults, list)
    found: list[dict[str, object]] = []
    for entry in defaults:
        name = str(entry).partition("@")[0].removeprefix(f"/{group}/")
        if name in catalogue.options[group] and name != option:
            found += _values(catalogue, group, name)
    return [*found, values]
