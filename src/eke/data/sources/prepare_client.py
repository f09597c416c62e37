"""Client of the preparation process, which alone imports tokenizers and datasets (slow)."""

import json
import subprocess
import sys
import threading
from typing import Any

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.process_env import child_environment, module_command
from eke.common.streams import speak
from eke.data.sources.request import PrepareRequest
from eke.data.sources.store import Store, read_manifest, store_folder

MOMENT_S = 1.0
"""Seconds before the user sees a progress message."""


def open_store(request: PrepareRequest) -> Store:
    """Open the prepared tokens of a request; prepare them first if needed.

    Raises:
        ConfigError: preparation failed: files, columns, tokenizer or disk.
    """
    folder = store_folder(request.key)
    manifest = read_manifest(folder)
    if manifest is None:
        _prepare(request)
        manifest = read_manifest(folder)
    if manifest is None:
        why = f"the prepared tokens disappeared from {folder}"
        fix = Fix(remark="export XDG_CACHE_HOME=FOLDER")
        raise ConfigError(Problem("data", request.option, why, fix))
    return Store(folder, manifest)


def _prepare(request: PrepareRequest) -> None:
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
    except BaseException:  # Ctrl-C: let the child clean up, too
        child.terminate()
        child.wait()
        raise
    _raise_problems(request, child.returncode, out, err)


def _talk(child: "subprocess.Popen[str]", request: PrepareRequest) -> tuple[str, str]:
    """Send the request without a timeout: Python 3.11 drops unsent input after one."""
    path = request.path if len(request.path) <= 80 else f"...{request.path[-77:]}"
    words = f"preparing data={request.option} {path} (once) ..."
    notice = threading.Timer(MOMENT_S, speak, (words, sys.stderr))
    notice.start()
    try:
        return child.communicate(request.to_json())
    finally:
        notice.cancel()


def _raise_problems(request: PrepareRequest, code: int, out: str, err: str) -> None:
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


def _unforeseen(request: PrepareRequest, code: int, err: str) -> Problem:
    last = next((line for line in reversed(err.splitlines()) if line.strip()), "no output")
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    why = f"the process that prepares the data {how}: {last.strip()[:300]}"
    fix = Fix(remark="free memory, then the same command") if code == -9 else Fix("data=synthetic")
    return Problem("data", request.option, why, fix)
