"""From what a user typed to run folders."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eke.common.errors import ConfigError, Problem
from eke.common.files import read_json
from eke.common.paths import RunPaths, SweepPaths, user_path
from eke.plan.record import no_runs


@dataclass(frozen=True)
class Found:
    """One folder to look at."""

    paths: RunPaths
    is_named: bool = False
    """Typed itself, not found in a folder of runs."""
    foreign: str = ""
    """Why it is no run; empty for a run."""


def find_runs(arguments: Sequence[str]) -> list[Found]:
    """Run folders, each once, in the order of the arguments.

    Args:
        arguments: run folders, folders of runs, sweep folders, or a file in one of them.

    Raises:
        ConfigError: every argument that leads to no run.
    """
    found: dict[Path, Found] = {}
    problems = []
    for argument in arguments:
        try:
            hits = list(_find(user_path(argument)))
            if not any(not hit.foreign for hit in hits):
                problems.append(no_runs([user_path(argument)], "sync"))
        except FileNotFoundError:
            problems.append(no_runs([user_path(argument)], "sync"))
            continue
        except (OSError, ValueError) as error:
            why = str(getattr(error, "strerror", None) or error)
            problems.append(Problem("DIR", argument, why, "eke sync runs"))
            continue
        for hit in hits:
            key = hit.paths.folder.resolve()
            if key not in found or hit.is_named:
                found[key] = hit
    if problems:
        raise ConfigError(problems)
    return list(found.values())


def _find(path: Path) -> Iterator[Found]:
    if path.is_file():
        path = path.parent
    paths = RunPaths(path.absolute())
    if SweepPaths(path).sweep.exists():
        yield from _cells(path)
    elif _is_run(paths):
        yield Found(paths, is_named=True)
    else:
        yield from _children(path)


def _is_run(paths: RunPaths) -> bool:
    return paths.record.exists() or paths.plan.exists()


def _children(folder: Path) -> Iterator[Found]:
    """Runs directly below a folder; whatever else lies there is named, but for sweeps."""
    for child in sorted(folder.iterdir()):
        if not child.is_dir() or child.name.startswith("."):
            continue
        paths = RunPaths(child.absolute())
        if _is_run(paths):
            yield Found(paths)
        elif not SweepPaths(child).sweep.exists():
            yield Found(paths, foreign="no record.json and no plan.json: not a run")


def _cells(folder: Path) -> Iterator[Found]:
    """The runs of a sweep: they lie beside its folder, which may have been moved with them.

    Raises:
        ValueError: sweep.json is not a sweep.
    """
    file = SweepPaths(folder).sweep
    content: Any = read_json(file)
    cells = content.get("cells") if isinstance(content, dict) else None
    if not isinstance(cells, list):
        raise ValueError(f"{file.name} is not a sweep's")
    for cell in cells:
        name = cell.get("folder") if isinstance(cell, dict) else None
        if not isinstance(name, str) or not name:
            continue  # refused, or not reached yet
        beside = RunPaths(folder.absolute().parent / Path(name).name)
        paths = beside if _is_run(beside) else RunPaths(Path(name).absolute())
        yield Found(paths, foreign="" if _is_run(paths) else "the sweep's run is gone")
