"""Nobody has to listen to what goes on."""

import errno
import os
import subprocess
import sys

import pytest

from eke.peers import speak

SPEAKER = """
import sys
from eke.peers import speak
speak("one")
sys.stdin.readline()  # until nobody reads any more
for _ in range(3):
    speak("two")
sys.stderr.write("went on")
"""


def test_who_is_not_heard_goes_on_and_ends_well() -> None:
    reading, writing = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", SPEAKER],
        stdin=subprocess.PIPE, stdout=writing, stderr=subprocess.PIPE, text=True,
    ) as speaker:  # fmt: skip
        os.close(writing)
        with os.fdopen(reading) as heard:
            assert heard.readline() == "one\n"
        _, said = speaker.communicate("\n")
    assert (speaker.returncode, said) == (0, "went on")


class Full:
    """A stream to a disk without room."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_an_error() -> None:
    with pytest.raises(OSError, match="No space left"):
        speak("something", Full())
