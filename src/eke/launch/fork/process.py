"""A process that another one forked for this one; Linux."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

PR_SET_CHILD_SUBREAPER = 36
"""linux/prctl.h; prctl(2): orphans among this process's descendants become its children."""


class Adopted:
    """A child that came by adoption; `subprocess.Popen`, as far as a worker needs it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._look(os.WNOHANG)

    def wait(self) -> int:
        """Its exit code, once it has one."""
        code = self._look(0)
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def _look(self, flags: int) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, flags)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


@contextmanager
def adopting() -> Iterator[None]:
    """Become the parent of orphans in here; afterwards others take care of them again.

    Raises:
        OSError: the system knows no such thing.
    """
    _adopt(True)
    try:
        yield
    finally:
        _adopt(False)


def _adopt(on: bool) -> None:
    try:
        failed = ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)
    except AttributeError as error:
        raise OSError("this system has no prctl") from error
    if failed:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
