"""DeepSpeed's operators in C++, which torch compiles at their first use on a machine.

torch 2.13 keeps a build to itself by a file, `lock`, that only the process which made it removes.
After a killed build every later one waits for that process, for ever and without a word
(https://github.com/pytorch/pytorch/issues/189245). The process holds the file open while it
builds, so that a lock which nobody holds is known to be left over.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from eke.hardware import file_system
from eke.paths import LOCAL_RANK

log = logging.getLogger(__name__)

CPU_ADAM, ASYNC_IO = ("cpu_adam",), ("pin_memory", "async_io")
"""What is built for AdamW on the host, and for files."""

SAY_AFTER_S = 3.0
"""An operator that was compiled before is loaded within this; whoever waits longer is told why."""

POLL_S = 0.5

REMOTE_QUIET_S = 1800.0
"""How long nothing may have changed in a folder that other machines see, too, until its lock counts
as left over: their processes are not seen from here, and one file compiles in minutes."""

LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs")
"""File systems that only this machine writes to."""

OWN = ("overlay", "tmpfs")
"""File systems that a container has for itself."""

ALL_PROCESSES = "pid:[4026531836]"
"""The namespace in which /proc shows all processes of a machine (PROC_PID_INIT_INO in Linux's
include/linux/proc_ns.h): not a container's."""


@contextmanager
def compiling(operators: tuple[str, ...], clock: Callable[[], float] = time.time) -> Iterator[None]:
    """Around the first use of operators: without left-over locks, and not in silence.

    Args:
        operators: names of DeepSpeed's builders.
        clock: seconds since 1970, as files have them.
    """
    folders = [build_folder(name) for name in operators]
    if os.environ.get(LOCAL_RANK, "0") == "0":  # the others wait in torch until that is done
        for folder in folders:
            wait_for_lock(folder, clock)
    what = " and ".join(operators)
    words = "compiling DeepSpeed's %s in C++: minutes, at the first use on a machine (%s)"
    said = threading.Timer(SAY_AFTER_S, log.info, (words, what, folders[0].parent))
    said.daemon = True
    said.start()
    start = time.monotonic()
    try:
        yield
    finally:
        said.cancel()
    if (seconds := time.monotonic() - start) > SAY_AFTER_S:
        log.info(
            "DeepSpeed's %s was ready after %.0f s; no step's time has that in it", what, seconds
        )


def build_folder(name: str) -> Path:
    """Where torch builds an operator: under TORCH_EXTENSIONS_DIR, or in the user's cache."""
    from torch.utils import cpp_extension

    return Path(cpp_extension._get_build_directory(name, verbose=False))


def wait_for_lock(folder: Path, clock: Callable[[], float] = time.time) -> None:
    """Until nobody builds in `folder`; a lock that was left over is removed, aloud."""
    lock, said = folder / "lock", False
    while (held := _identity(lock)) is not None:
        owner = holder_of(lock)
        if owner is None and _is_left_over(folder, clock()):
            if _identity(lock) == held:  # not a new one, of somebody who was quicker
                lock.unlink(missing_ok=True)
                log.warning("removed %s: the build that left it behind is gone", lock)
            continue
        if not said:
            log.info("waiting for %s: %s", lock, _who(owner))
            said = True
        time.sleep(POLL_S)


def holder_of(lock: Path) -> int | None:
    """Process id of whoever has the file open; None where no process of this machine has."""
    wanted = _identity(lock)
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone by now, or another user's
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if _identity(descriptor) == wanted:
                        return int(process.name)
    return None


def _is_left_over(folder: Path, now: float) -> bool:
    """Whether nobody can be building there, since no process that is seen from here is."""
    try:
        mine = (folder / "lock").stat().st_uid == os.getuid()  # another user's files are not shown
        if mine and _sees_all_who_write(folder):
            return True
        return now - max(f.stat().st_mtime for f in (folder, *folder.iterdir())) > REMOTE_QUIET_S
    except OSError:  # a file is gone: somebody works there
        return False


def _sees_all_who_write(folder: Path) -> bool:
    kind = file_system(folder)
    return kind in OWN or (kind in LOCAL and os.readlink("/proc/self/ns/pid") == ALL_PROCESSES)


def _who(owner: int | None) -> str:
    if owner is not None:
        return f"process {owner} compiles there"
    return (
        "perhaps another machine or user compiles there; taken for left over when nothing changes "
        f"for {REMOTE_QUIET_S / 60:.0f} minutes (if you know it is, remove it)"
    )


def _identity(file: Path) -> tuple[int, int] | None:
    """Device and number of a file; None where there is none."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
