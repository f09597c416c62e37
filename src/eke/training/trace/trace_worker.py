"""Trace worker (`python -m eke.training.trace.trace_worker`): plans in, results out, by line.

The fake device is registered for an entire process. An answer is `{"traced": ...}` or `{"reason":
...}`. If a library aborts, only this process ends, and the client detects it.
"""

import importlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterable
from functools import cache
from typing import Any, TextIO

from eke.common.python_runtime import describe_missing_api, importing, relax_gc
from eke.config.schema.codec import make_converter
from eke.plan.planner import Plan
from eke.training.loop.environment import QUIET

_SETTINGS = QUIET | {
    "HF_HUB_OFFLINE": "1",  # a model's configuration is enough for its size
    "TRANSFORMERS_VERBOSITY": "error",
    "BITSANDBYTES_NOWELCOME": "1",
}


def _main() -> int:
    """Answer requests until the end of the input."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of libraries goes to stderr
    os.environ.update({name: os.environ.get(name, value) for name, value in _SETTINGS.items()})
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    relax_gc()
    serve(iter(sys.stdin.readline, ""), answers)
    return 0


def serve(lines: Iterable[str], answers: TextIO) -> None:
    """Answer each line."""
    for answer in map(_answer_line, lines):
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


@cache
def import_libraries() -> None:
    """Import the libraries of a trace once: again would also freeze remains of earlier traces."""
    with importing():
        from eke.training.model import import_transformers

        importlib.import_module("eke.training.trace.trace_plan")
        import_transformers()


def _answer_line(line: str) -> dict[str, Any]:
    converter = make_converter()
    try:
        plan = converter.structure(json.loads(line), Plan)
    except Exception as error:  # cattrs raises groups of any errors
        return {"reason": f"not a readable plan ({type(error).__name__})"}
    try:
        import_libraries()
        from eke.training.trace.trace_plan import Untraceable, trace

        try:
            return {"traced": converter.unstructure(trace(plan))}
        except Untraceable as error:
            return {"reason": str(error)}
    except (ImportError, AttributeError) as error:
        if not (reason := describe_missing_api(error)):
            raise
        return {"reason": reason}


if __name__ == "__main__":
    sys.exit(_main())
