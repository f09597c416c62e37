"""The fork server with hardly an import: what it forks is what the tests' stand-in worker does."""

import os
import sys
import time

from eke.training.loop import fork_server


def import_little(modules) -> None:
    """Wait, fail or go on, as the test has typed it in place of modules."""
    with fork_server.one_thread():
        fork_server.import_if_there("numpy.random")
    for word in modules:
        if word == "hang":
            time.sleep(600)
        if word == "die":
            os._exit(3)
        if word == "cannot-fork":
            fork_server.orphan = no_process


def no_process(work) -> None:
    """As on a machine that has too many."""
    raise BlockingIOError("no process")


if __name__ == "__main__":
    fork_server.import_all = import_little
    fork_server.why_unfit = lambda: "unfit, says the test" if "unfit" in sys.argv else ""
    sys.exit(fork_server.main(sys.argv[1:]))
