"""`eke evaluate RUN [overrides]`: parse the command line, evaluate and print."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from eke.common.files import plain
from eke.workflows import print_once
from eke.workflows.evaluate import evaluate, render

DESCRIPTION = """\
Evaluates the model of a finished run: loss, and accuracy, F1 and each class, or perplexity and
token accuracy. Without overrides on the run's own evaluation samples; data that is named
(data.path=test.csv, or another option of data) is evaluated to its last row. Overrides of
precision, attention, hardware, dataloader and batch.eval_per_device say how.

evaluate.generate=true also lets the model write answers, the most probable token each time, of
evaluate.max_new_tokens=128 at most: exact match, and ROUGE-L by words.
"""


def main(arguments: Sequence[str]) -> int:
    """Parse, evaluate and print; return the exit code."""
    parser = argparse.ArgumentParser(
        "eke evaluate", description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("run", metavar="RUN", help="a run's folder, or its id in runs/")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="data.path=test.csv")
    parser.add_argument("--json", action="store_true", help="for machines")
    options = parser.parse_args(arguments)
    found = evaluate(options.run, options.overrides)
    content = json.dumps(plain(asdict(found)), indent=1, allow_nan=False)
    return print_once(content if options.json else render(found))
