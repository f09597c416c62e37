"""Folders of runs and sweeps, also by the beginning of their names."""

from pathlib import Path

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.files import read_json
from eke.common.paths import RunPaths, SweepPaths, short_path, user_path
from eke.config.schema import Config

_SHOWN = 8
"""Number of matches that an error lists."""


def find_folder(text: str, key: str = "DIR") -> Path:
    """Return a path, or the only run or sweep whose name begins with its last part.

    Searches the path's folder, the runs of a sweep if the folder is one, and for a plain name the
    default folder of runs. `key` names the argument. Raises ConfigError for several matches.
    Without a match it returns the path.
    """
    path = user_path(text)
    if path.exists() or not path.name:
        return path
    parents = [path.parent, *([user_path(Config().paths.runs)] if path.name == text else [])]
    starts = (path.name, f"sweep-{path.name}")
    found = {p for parent in parents for p in _runs_inside(parent) if p.name.startswith(starts)}
    matches = sorted(p for p in found if RunPaths(p).is_run or SweepPaths(p).sweep.exists())
    matches = [each for each in matches if each.name == path.name][:1] or matches
    if len(matches) > 1:
        names = ", ".join(each.name for each in matches[:_SHOWN])
        more = f" and {len(matches) - _SHOWN} more" if len(matches) > _SHOWN else ""
        why = f"begins the names of {len(matches)} folders: {names}{more}"
        raise ConfigError(Problem(key, text, why, Fix(remark=short_path(matches[0])), "ambiguous"))
    return matches[0] if matches else path


def _runs_inside(parent: Path) -> list[Path]:
    """Return the runs of a sweep, else the content of a folder."""
    try:
        if SweepPaths(parent).sweep.exists():
            cells = read_json(SweepPaths(parent).sweep)["cells"]
            names = [Path(cell.get("folder") or cell.get("run_id") or "").name for cell in cells]
            return [parent.parent / name for name in names if name]
        return [*parent.iterdir()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
