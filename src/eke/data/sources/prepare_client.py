"""Asking for a store: the one that is there, or a process of its own that prepares it.

Tokenizers and the datasets library are heavy, so they are only ever imported there.
"""

import json
import subprocess
import sys
import threading
from typing import Any

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.process_env import child_environment, module_command
from eke.common.streams import speak
from eke.data.sources.request import Request
from eke.data.sources.store import Store, read_manifest, store_folder

MOMENT_S = 1.0
"""After so many seconds the user is told what is being waited for."""


def open_store(request: Request) -> Store:
    """The prepared tokens of a request, prepared now if they are not there.

    Raises:
        ConfigError: they cannot be: whatever is wrong with files, columns, tokenizer or the disk.
    """
    folder = store_folder(request.key)
    manifest = read_manifest(folder)
    if manifest is None:
        _prepare(request)
        manifest = read_manifest(folder)
    if manifest is None:
        why = f"the prepared tokens vanished again from {folder}"
        raise ConfigError(
            Problem("data", request.option, why, Fix(remark="export XDG_CACHE_HOME=FOLDER"))
        )
    return Store(folder, manifest)


def _prepare(request: Request) -> None:
    child = subprocess.Popen(
        module_command("eke.data.preparation", "-"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=child_environment(),
        text=True,
        encoding="utf-8",
        errors="surrogateescape",
    )
    try:
        out, err = _talk(child, request)
    except BaseException:  # Ctrl-C: the other process leaves nothing behind, too
        child.terminate()
        child.wait()
        raise
    _raise_problems(request, child.returncode, out, err)


def _talk(child: "subprocess.Popen[str]", request: Request) -> tuple[str, str]:
    """Send the request in one go: after a time limit Python 3.11 does not send what is left."""
    words = f"preparing data={request.option} {_shown(request.path)} (once) ..."
    notice = threading.Timer(MOMENT_S, speak, (words, sys.stderr))
    notice.start()
    try:
        return child.communicate(request.to_json())
    finally:
        notice.cancel()


def _shown(path: str) -> str:
    return path if len(path) <= 80 else f"...{path[-77:]}"


def _raise_problems(request: Request, code: int, out: str, err: str) -> None:
    if code == 0:
        return
    try:
        found = json.loads(out.splitlines()[-1])
        problems = [_problem(**problem) for problem in found["problems"]]
    except (ValueError, IndexError, KeyError, TypeError):
        problems = [_unforeseen(request, code, err)]
    raise ConfigError(problems)


def _problem(fix: dict[str, Any], **rest: Any) -> Problem:
    return Problem(**rest, fix=Fix(*fix["words"], remark=fix["remark"]))


def _unforeseen(request: Request, code: int, err: str) -> Problem:
    last = next((line for line in reversed(err.splitlines()) if line.strip()), "it said nothing")
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    why = f"the process that prepares the data {how}: {last.strip()[:300]}"
    fix = Fix(remark="free memory, then the same command") if code == -9 else Fix("data=synthetic")
    return Problem("data", request.option, why, fix)
