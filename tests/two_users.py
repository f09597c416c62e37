"""Two users of one machine, for tests that root runs: what one may do to the files of the other."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

VICTIM, ATTACKER = 12001, 12002

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")


@contextmanager
def as_user(number: int) -> Iterator[None]:
    """Be this user, without root's rights, in this process."""
    os.setegid(number)
    os.seteuid(number)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder like /tmp, which every user reaches: pytest's own is for its user alone."""
    folder = Path(tempfile.mkdtemp(prefix="eke-shared-", dir="/tmp"))
    try:
        folder.chmod(0o1777)
        yield folder
    finally:
        shutil.rmtree(folder)


def give(folder: Path, number: int) -> None:
    """Make a user the owner of a folder and of all in it."""
    for path in (folder, *folder.rglob("*")):
        os.chown(path, number, number, follow_symlinks=False)
