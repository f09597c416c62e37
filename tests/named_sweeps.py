"""The named sweeps there are: a new file in sweeps/ is tested without being named anywhere."""

import re
import shlex
from collections.abc import Iterable
from functools import cache
from itertools import takewhile

import yaml

from eke.config.compose.catalogue import headline, make_catalogue
from eke.config.sweep import SweepCell, expand
from eke.config.sweep.definition import value_text
from eke.launch.processes.sweep import SweepRun
from eke.plan.planner import Plan
from eke.workflows.sweep import plan_cells

FILES = {name: file for name, file in make_catalogue().options["sweep"].items() if name != "none"}


def rows_of(name: str) -> dict[str, list[str]]:
    """Row -> its overrides, of the rows that a file names, in order."""
    rows = yaml.safe_load(FILES[name].read_text())["sweep"]["rows"]
    return {row: [f"{k}={value_text(v)}" for k, v in said.items()] for row, said in rows.items()}


def words_of(overrides: Iterable[str]) -> set[str]:
    """Overrides; of a number only the key, since code does not depend on the number."""
    return {re.sub(r"=[-+]?[\d.]+(e[-+]?\d+)?$", "", word) for word in overrides}


def words_before(name: str) -> set[str]:
    """Words of the rows of all earlier files, where they are trained if they run on a CPU."""
    earlier = takewhile(lambda other: other != name, FILES)
    return {word for each in earlier for row in rows_of(each).values() for word in words_of(row)}


def command_of(name: str) -> list[str]:
    """What the first line says to type, behind `python`."""
    return shlex.split(headline(FILES[name]).partition(" -- ")[0])[1:]


@cache
def expanded(*typed: str) -> tuple[SweepCell, ...]:
    """A sweep's cells; tests that ask for the same ones share them, which take seconds."""
    return expand(typed).cells


def planned(*typed: str) -> tuple[list[SweepRun], list[Plan | None]]:
    """A sweep as it would start on this machine's CPU."""
    return plan_cells(expand([*typed, "hardware=cpu"]).cells, "test", lambda done, total: None)
