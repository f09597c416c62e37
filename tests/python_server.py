"""Python code as any user, in forks of one process that has imported most of eke.

A fresh process imports for half a second what runs for milliseconds. The server is root's, has no
threads and does nothing itself; each fork is a process of its user, in a folder, with an
environment and with output of its own.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from support import PATIENCE_S, REPO, Finished

MODULES = (
    "eke.cli.plan", "eke.cli.report", "eke.cli.run_commands", "eke.cli.sync", "eke.launch.local",
    "eke.launch.slurm.submit_array", "eke.results.report.show.file_formats",
    "eke.results.report.show.terminal", "eke.results.trackers.sync.account",
    "eke.training.distributed.build_operators", "eke.training.loop.worker",
)  # fmt: skip

START = "import json, os, sys\nfrom pathlib import Path\nP = lambda n: Path(sys.argv[n])\n"

READ_ALL = 1 << 2
"""CAP_DAC_READ_SEARCH: users may read everything, since Python may lie in root's folders."""
KEEP_CAPABILITIES, AMBIENT, RAISE = 8, 47, 2
"""Arguments of prctl (linux/prctl.h)."""


def run(
    uid: int, code: str, *arguments: Any, cwd: Path, environment: Mapping[str, str], out: str = "",
    modules: Sequence[str] = MODULES,
) -> Finished:  # fmt: skip
    """Run code in a fork; `P(n)` in it is the n-th argument as a path.

    Args:
        uid: Whose process it is.
        code: Python; `json`, `os`, `sys` and `Path` are imported.
        arguments: `sys.argv[1:]`.
        cwd: Where it runs.
        environment: Its variables, and no others.
        out: A file or terminal for both streams; without it, both are returned.
        modules: Imported before; of `module:function`, the function is called, too. Each choice
            has a server, which starts with the first request.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [out or f"{folder}/out", out or f"{folder}/err"]
        request = {
            "uid": uid, "code": START + code, "arguments": [*map(str, arguments)],
            "cwd": str(cwd), "environment": dict(environment), "files": files,
        }  # fmt: skip
        exit_code = _server(*modules).ask(request)
        said = ["", ""] if out else [Path(file).read_text(errors="replace") for file in files]
    return Finished(exit_code, *said)


@functools.cache
def _server(*modules: str) -> "_Server":
    server = _Server(*modules)
    atexit.register(server.close)
    return server


class _Server:
    """The server, which starts with the first request."""

    def __init__(self, *modules: str) -> None:
        paths = [str(REPO / "src"), str(REPO / "tests"), os.environ.get("PYTHONPATH", "")]
        self.process = subprocess.Popen(
            [sys.executable, "-P", __file__, *modules],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )  # fmt: skip

    def ask(self, request: Mapping[str, Any]) -> int:
        """The exit code, negative for a signal."""
        assert self.process.stdin
        assert self.process.stdout
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            return int(self.process.stdout.readline())
        except BaseException:  # a test's time limit, too: its answer is not the next one's
            self.process.kill()
            _server.cache_clear()
            raise

    def close(self) -> None:
        """End it."""
        self.process.communicate()


def serve() -> None:
    """Answer requests until nobody asks any more."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    for name in sys.argv[1:]:
        module, _, function = name.partition(":")
        loaded = importlib.import_module(module)
        if function:
            getattr(loaded, function)()
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            be_user(**json.loads(line))
        _, status = os.waitpid(pid, 0)
        replies.write(f"{os.waitstatus_to_exitcode(status)}\n")
        replies.flush()


def be_user(
    uid: int, code: str, arguments: list[str], cwd: str, environment: dict[str, str],
    files: list[str],
) -> NoReturn:  # fmt: skip
    """Do what was asked for, and end."""
    result: Any = 1
    try:
        os.setpgid(0, 0)
        signal.alarm(int(PATIENCE_S))
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, file in enumerate(files, 1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_NOCTTY), number)
        if uid:
            become(uid)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None
        sys.argv = ["-c", *arguments]
        exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
        result = 0
    except SystemExit as end:
        result = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(result if isinstance(result, int) else 1)


def become(uid: int) -> None:
    """Be a user who may read everything, for good, as what this process starts."""
    libc = ctypes.CDLL(None, use_errno=True)

    def must(result: int) -> None:
        if result:
            raise OSError(ctypes.get_errno(), "cannot become another user")

    os.setgroups([])
    os.setresgid(uid, uid, uid)
    must(libc.prctl(KEEP_CAPABILITIES, 1, 0, 0, 0))
    os.setresuid(uid, uid, uid)
    version_3 = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)(READ_ALL, READ_ALL, READ_ALL, 0, 0, 0)
    must(libc.capset(version_3, sets))
    must(libc.prctl(AMBIENT, RAISE, 2, 0, 0))


if __name__ == "__main__":
    serve()
