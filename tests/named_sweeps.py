"""The named sweeps there are: a new file in sweeps/ is tested without being named anywhere."""

import shlex
from functools import cache

import yaml

from eke.config.compose.catalogue import headline, make_catalogue
from eke.config.sweep import SweepCell, expand
from eke.launch.processes.sweep import Cell
from eke.plan.planner import Plan
from eke.workflows.sweep import plan_cells

FILES = {name: file for name, file in make_catalogue().options["sweep"].items() if name != "none"}


def rows_of(name: str) -> list[str]:
    """The rows that a file names, in order."""
    return list(yaml.safe_load(FILES[name].read_text())["sweep"]["rows"])


def command_of(name: str) -> list[str]:
    """What the first line says to type, behind `python`."""
    return shlex.split(headline(FILES[name]).partition(" -- ")[0])[1:]


@cache
def expanded(*typed: str) -> tuple[SweepCell, ...]:
    """A sweep's cells; tests that ask for the same ones share them, which take seconds."""
    return expand(typed).cells


def planned(*typed: str) -> tuple[list[Cell], list[Plan | None]]:
    """A sweep as it would start on this machine's CPU."""
    return plan_cells(expand([*typed, "hardware=cpu"]).cells, "test", lambda done, total: None)
