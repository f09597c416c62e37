"""`python -m eke.data.preparation REQUEST`: prepare the tokens of a request (`-`: of stdin).

The last line of standard output is JSON: `{"folder": ...}`, or `{"problems": [...]}` with code 2.
"""

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from eke.common.errors import ConfigError
from eke.common.process_env import end_with_parent
from eke.data.sources import request_from_json

USAGE = """\
usage: python -m eke.data.preparation REQUEST
tokenizes a dataset for eke; REQUEST is a JSON file, or - for standard input"""


def main(arguments: list[str]) -> int:
    """Prepare the data; returns the exit code: 0, or 2 for invalid input."""
    if len(arguments) != 1 or (arguments[0].startswith("-") and arguments[0] != "-"):
        sys.stderr.write(f"{USAGE}\n")
        return 2
    signal.signal(signal.SIGTERM, _leave)
    end_with_parent(signal.SIGTERM, str(os.getppid()))
    text = sys.stdin.read() if arguments[0] == "-" else Path(arguments[0]).read_text()
    from eke.data.preparation.rows import prepare_store  # slow: after the signal handler is set

    answer: dict[str, object]
    try:
        answer = {"folder": str(prepare_store(request_from_json(text)))}
    except ConfigError as error:
        answer = {"problems": [dataclasses.asdict(p) for p in error.problems]}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    return 2 if "problems" in answer else 0


def _leave(number: int, _: FrameType | None) -> None:
    """Exit through every `finally` on SIGTERM, so that no partial files remain."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except KeyboardInterrupt:
        code = 75
    sys.stdout.flush()
    sys.stderr.flush()
    # Libraries' threads (Arrow's, the tokenizer's) have been seen to abort at interpreter exit.
    os._exit(code)
