"""The winner as an option of the group `experiment`, whole and with its evidence."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from eke.common.errors import ConfigError, Problem
from eke.common.files import write_atomic
from eke.common.paths import conf_folder, program
from eke.config.compose import Composed, compose
from eke.config.compose.catalogue import make_catalogue
from eke.config.compose.independent_options import PRESETS
from eke.config.schema.codec import make_converter

MADE_BY = "eke fit"
"""In the first lines of a file that may be written over."""

OF_THE_PLACE = ("hardware", "launcher", "resources", "slurm", "paths", "sweep", "tracker")
"""Sections that say where and how a run is started: the next one may be started elsewhere."""

MAX_MISSING = 20
"""Keys without a default that one configuration may have: more than any option's."""


def write_experiment(
    composed: Composed, name: str, config_dir: Path | None, folder: Path, evidence: Sequence[str]
) -> Path:
    """Write `experiment/NAME.yaml`; returns its path.

    Args:
        composed: the configuration to keep.
        name: of the option.
        config_dir: a folder with the user's own options.
        folder: with options, to write into: that one, or eke's own.
        evidence: lines for the file's head.

    Raises:
        ConfigError: there is a file of that name that somebody else has written.
        OSError: the folder cannot be written.
    """
    path = free_path(folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, experiment_text(composed, name, config_dir, evidence), shared=True)
    return path


def refuse_what_is_no_name(name: str) -> None:
    """Of an option.

    Raises:
        ConfigError: it cannot be typed as one.
    """
    if not re.fullmatch(r"[A-Za-z]\w*", name):
        why = "an option's name is letters, digits and underscores"
        raise ConfigError(Problem("--name", name, why, "--name fastest"))


def own_path(folder: Path, name: str) -> Path:
    """Where the option would be written, whether or not that can be done here.

    Raises:
        ConfigError: the name is none, or somebody else has written what it stands for.
    """
    refuse_what_is_no_name(name)
    path = folder / "experiment" / f"{name}.yaml"
    if path.exists() and MADE_BY not in path.read_text(encoding="utf-8"):
        why = f"{path} is there, and eke fit did not write it"
        raise ConfigError(Problem("--name", name, why, f"--name {name}_fit"))
    theirs = conf_folder() / "experiment" / path.name
    if theirs.exists() and not path.exists():
        why = "eke has an experiment of this name, and it would be taken instead"
        raise ConfigError(Problem("--name", name, why, f"--name {name}_fit"))
    return path


def free_path(folder: Path, name: str) -> Path:
    """Where the option will be written.

    Raises:
        ConfigError: as own_path, or none can be written there.
    """
    path = own_path(folder, name)
    place = next(each for each in (path.parent, *path.parents) if each.exists())
    if not os.access(place, os.W_OK):
        why = f"{place} cannot be written, and the best is to be kept there as an option"
        raise ConfigError(Problem("--config-dir", str(folder), why, "--config-dir my_conf"))
    return path


def experiment_text(
    composed: Composed, name: str, config_dir: Path | None, evidence: Sequence[str]
) -> str:
    """The file's content: every choice and value that is not eke's default."""
    usual = make_catalogue(config_dir).defaults
    chosen = {
        group: option
        for group, option in composed.choices.items()
        if group not in (*PRESETS, *OF_THE_PLACE) and usual.get(group) != option
    }
    wanted = make_converter().unstructure(composed.config)
    defaults = _with_defaults(chosen, wanted, config_dir)
    values = {
        section: _changed(content, defaults[0].get(section), defaults[1], f"{section}.")
        for section, content in wanted.items()
        if section not in (*OF_THE_PLACE, "plan_only", "rerun", "repeat", "ignore_forecast")
    }
    content: dict[str, Any] = {
        "defaults": [{f"override /{group}": option} for group, option in chosen.items()]
    }
    content |= {section: value for section, value in values.items() if value not in ({}, None)}
    lines = ["# @package _global_", f"# {program()} experiment={name} -- found by {MADE_BY}."]
    lines += [f"# {line}".rstrip() for line in evidence]
    return "\n".join(lines) + "\n" + yaml.safe_dump(content, sort_keys=False, width=1000)


def _with_defaults(
    chosen: Mapping[str, str], wanted: Mapping[str, Any], config_dir: Path | None
) -> tuple[dict[str, Any], set[str]]:
    """What the choices alone make, and the keys that they leave to be filled in."""
    options = [f"{group}={option}" for group, option in chosen.items()]
    filled: dict[str, str] = {}
    for _ in range(MAX_MISSING):
        try:
            values = [f"{key}={value}" for key, value in filled.items()]
            config = compose([*options, *values], config_dir).config
            return make_converter().unstructure(config), set(filled)
        except ConfigError as error:
            missing = [problem.path for problem in error.problems if "." in problem.path]
            if not missing or missing[0] in filled:
                raise
            section, _, field = missing[0].partition(".")
            filled[missing[0]] = f"'{wanted[section][field]}'"
    raise AssertionError(f"more than {MAX_MISSING} keys without a default")


def _changed(wanted: Any, usual: Any, filled: set[str], path: str) -> Any:
    """What differs from the defaults, as a tree; {} or None where nothing does."""
    if not isinstance(wanted, dict):
        return None if wanted == usual else wanted
    before = usual if isinstance(usual, dict) else {}
    changed = {
        key: value
        for key, value in wanted.items()
        if key != "option" and (value != before.get(key) or f"{path}{key}" in filled)
    }
    return changed
