"""The files of a run whose training state lies on a disk: where they are, and their removal."""

import hashlib
from contextlib import suppress
from pathlib import Path

from eke.common.files import remove_tree
from eke.common.paths import RunPaths, user_path
from eke.config.schema import NvmeOffload
from eke.plan.planner.plan import Plan

STATE = "zero_stage_3"
"""DeepSpeed's folder in the folder it is told."""


def swap_folder(plan: Plan, paths: RunPaths) -> Path | None:
    """Where this run's files are: no other run's, wherever its folder is. None without files."""
    offload = plan.config.offload
    if plan.deepspeed is None or not isinstance(offload, NvmeOffload):
        return None
    place = hashlib.sha256(str(paths.folder.absolute()).encode()).hexdigest()[:8]
    return user_path(offload.path).absolute() / f"eke-{paths.folder.name}-{place}"


def remove_swap(folder: Path | None, rank: int | None = None) -> None:
    """Remove one rank's files, or all, and the folder itself once no rank has any."""
    if folder is None:
        return
    for mine in folder.glob(f"{STATE}/*/rank{'*' if rank is None else rank}"):
        remove_tree(mine)
    for empty in (*folder.glob(f"{STATE}/*"), folder / STATE, folder):
        with suppress(OSError):  # another rank's files are there, or it was first
            empty.rmdir()


def swap_files(folder: Path, rank: int) -> dict[str, int]:
    """Bytes of one rank's files: `optimizer` and `weights`, as the file system has them."""
    found = {"optimizer": 0, "weights": 0}
    for file in folder.glob(f"{STATE}/*/rank{rank}/*.swp"):
        kind = "optimizer" if file.parents[1].name == "optimizer" else "weights"
        with suppress(OSError):
            found[kind] += file.stat().st_size
    return found
