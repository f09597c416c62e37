"""Commands as two users of one machine, which takes root: what one plants, the other meets."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from python_server import run
from support import Finished, environment

VICTIM, ATTACKER = 12001, 12002

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="two users need root")


def environment_of(home: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """The variables of a user."""
    return {
        **environment(home),
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
        "PYTHONDONTWRITEBYTECODE": "1",
        **dict.fromkeys(("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"), ""),
        **variables,
    }


def python(uid: int, code: str, *arguments: Any, cwd: Path, **variables: str) -> Finished:
    """Python code of a user; `P(n)` is the n-th argument as a path."""
    return run(uid, code, *arguments, cwd=cwd, environment=environment_of(cwd, variables))


def train(uid: int, *overrides: str, cwd: Path, **variables: str) -> Finished:
    """What `python train.py ...` does, as a user."""
    code = "from eke import workflows\nsys.exit(workflows.main(sys.argv[1:]))"
    return python(uid, code, *overrides, cwd=cwd, **variables)


@pytest.fixture
def machine() -> Iterator[Path]:
    """A folder like /tmp, but where the kernel protects nobody: 0777 without the sticky bit.

    In it `victim` and `attacker`, the homes of both, and the victim's `thesis.tex`.
    """
    folder = Path(tempfile.mkdtemp(prefix="two-users-", dir="/tmp"))
    folder.chmod(0o777)
    for name, uid in (("victim", VICTIM), ("attacker", ATTACKER)):
        home = folder / name
        home.mkdir()
        os.chown(home, uid, uid)
    thesis = folder / "victim" / "thesis.tex"
    thesis.write_text("years of work")
    os.chown(thesis, VICTIM, VICTIM)
    yield folder
    shutil.rmtree(folder)


def hand(path: Path, uid: int, mode: int | None = None) -> Path:
    """Make a file, link or folder, with what is in it, a user's."""
    for each in (path, *path.rglob("*")):
        os.chown(each, uid, uid, follow_symlinks=False)
    if mode is not None:
        path.chmod(mode)
    return path


__all__ = ["ATTACKER", "VICTIM", "hand", "machine", "needs_root", "python", "train"]
