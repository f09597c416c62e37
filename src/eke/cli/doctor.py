"""`eke doctor`: what this machine has and which options it can run, in a terminal or as JSON."""

import argparse
import dataclasses
import json
import shutil
import sys
from collections.abc import Sequence

from eke.cli.examination import examine
from eke.cli.render_doctor import render
from eke.common.errors import EkeError
from eke.plan.record import EXIT_OK

DESCRIPTION = """\
Looks at this machine: GPUs and what connects them, cores, memory, packages, and which options of
every group could run here, as the rules see it. Changes nothing and trains nothing.
"""
MAX_WIDTH = 100
"""Columns: longer lines are hard to read."""


def main(arguments: Sequence[str]) -> int:
    """Look and print; returns 0 whatever was found, 2 for the user's mistake."""
    parser = argparse.ArgumentParser(
        "eke doctor", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="for machines")
    options = parser.parse_args(arguments)
    try:
        found = examine()
    except EkeError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    if options.json:
        text = json.dumps(dataclasses.asdict(found), indent=2)
    else:
        text = render(found, min(MAX_WIDTH, shutil.get_terminal_size().columns))
    sys.stdout.write(text + "\n")
    return EXIT_OK
