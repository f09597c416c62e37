"""Folders in which somebody looks for runs, and there are none."""

from collections.abc import Sequence
from pathlib import Path

from eke.errors import Problem
from eke.spelling import closest_path


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
        meant = closest_path(folders[0]) if len(folders) == 1 else None
    text = ", ".join(map(str, folders))
    return Problem("DIR", text, "; ".join([why, *notes]), f"eke {command} {meant or usual}")
