"""Nobody has to listen to what goes on."""

import os
import subprocess
import sys

SPEAKER = """
import sys
from eke.common.streams import speak
from eke.common.streams import open_streams
open_streams()
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
