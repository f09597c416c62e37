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
from pathlib import Path
from typing import Any, TextIO

from eke.common.python_runtime import describe_missing_api, importing, relax_gc
from eke.config.schema import Config
from eke.config.schema.codec import make_converter
from eke.plan import own_code
from eke.plan.own_code import Code
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
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # own code must not wait for input, or read requests
    serve(iter(requests.readline, ""), answers)
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
        content = json.loads(line)
        if content.keys() == {"config", "code"}:
            return _examined(content)
        plan = converter.structure(content, Plan)
    except Exception as error:  # cattrs raises groups of any errors
        return {"reason": f"not a readable plan ({type(error).__name__})"}
    own_code.serve_code(plan.code, own_code.code_store(plan.code) if plan.code else Path())
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


def _examined(content: dict[str, Any]) -> dict[str, Any]:
    """Return what is found about own code."""
    converter = make_converter()
    with importing():
        from eke.training.custom.probe import examine
    config = converter.structure(content["config"], Config)
    code = converter.structure(content["code"], Code)
    return dict(converter.unstructure(examine(config, code)))


if __name__ == "__main__":
    sys.exit(_main())
