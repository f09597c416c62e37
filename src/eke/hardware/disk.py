"""The file system that a folder lies in."""

from pathlib import Path

_MOUNTS = Path("/proc/self/mounts")


def file_system(path: Path, mounts: Path = _MOUNTS) -> str:
    """Its kind as the kernel names it (`ext4`, `nfs4`, `tmpfs`); empty where that is not told.

    Args:
        path: exists.
        mounts: the kernel's table.
    """
    try:
        rows = [line.split() for line in mounts.read_text(errors="replace").splitlines()]
    except OSError:
        return ""
    place = path.resolve()
    # Of several mounts on one folder the last one is seen; a space in its name is \\040.
    known = {row[1].encode().decode("unicode_escape"): row[2] for row in rows if len(row) > 2}
    return next((known[str(p)] for p in (place, *place.parents) if str(p) in known), "")
