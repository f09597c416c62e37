"""Folders in which somebody looks for runs, and there are none."""

from collections.abc import Sequence
from pathlib import Path

from eke.common.did_you_mean import closest_path
from eke.common.errors import Problem


def no_runs(
    folders: Sequence[Path], command: str, notes: Sequence[str] = (), usual: str = "runs"
) -> Problem:
    """What is said of them.

    Args:
        folders: as typed; none of them leads to a run.
        command: of eke, which may be typed of another folder: `status`.
        notes: what of them could not be read.
        usual: the folder that is proposed where nothing beside it has nearly that name.
    """
    why, meant = "holds no run and no sweep that can be read", None
    if not any(folder.exists() for folder in folders):
        why = "there is no such folder"
        near = closest_path(folders[0]) if len(folders) == 1 else None
        meant = near if near is not None and _leads_to_runs(near) else None
    text = ", ".join(map(str, folders))
    return Problem("DIR", text, "; ".join([why, *notes]), f"eke {command} {meant or usual}")


def _leads_to_runs(folder: Path) -> bool:
    """Whether it is a sweep or a run, or holds one: a name that is near may be anything's."""
    marks = ("sweep.json", "plan.json", "record.json")
    return any(any(folder.glob(f"{depth}{mark}")) for depth in ("", "*/") for mark in marks)
