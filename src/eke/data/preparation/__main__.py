"""`python -m eke.data.preparation`: prepare the tokens of the request on standard input.

Prints one line of JSON: `{"folder": ...}`, or `{"problems": [...]}` with exit code 2.
"""

import dataclasses
import json
import os
import signal
import sys
from types import FrameType

import cattrs

from eke.common.errors import ConfigError
from eke.common.process_env import end_with_parent
from eke.data.sources import PrepareRequest


def _main() -> int:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # the output of libraries goes to standard error
    signal.signal(signal.SIGTERM, _exit_on_signal)
    end_with_parent(signal.SIGTERM, str(os.getppid()))
    request = cattrs.structure(json.load(sys.stdin), PrepareRequest)
    from eke.data.preparation.rows import prepare_store  # slow, so after the signal handler

    answer: dict[str, object]
    try:
        answer = {"folder": str(prepare_store(request))}
    except ConfigError as error:
        answer = {"problems": [dataclasses.asdict(p) for p in error.problems]}
    answers.write(json.dumps(answer) + "\n")
    answers.flush()
    return 2 if "problems" in answer else 0


def _exit_on_signal(number: int, _: FrameType | None) -> None:
    """Exit on SIGTERM by an exception, so that partial files are removed."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    try:
        code = _main()
    except KeyboardInterrupt:
        code = 75
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of Arrow and of tokenizers can abort at interpreter exit.
    os._exit(code)
