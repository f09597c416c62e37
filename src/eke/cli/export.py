"""`eke export RUN DIR`: parse the command line and print what was written."""

import argparse
from collections.abc import Sequence

from eke.workflows import print_once
from eke.workflows.export import export

DESCRIPTION = """\
Writes the model of a finished run for other libraries: safetensors, config.json, tokenizer with its
chat template, generation config, and a model card. No optimizer state. A run with adapters gives
the adapter, as PEFT loads it, or with --merge a model that plain transformers loads.
"""


def main(arguments: Sequence[str]) -> int:
    """Parse, export and print; return the exit code."""
    parser = argparse.ArgumentParser(
        "eke export", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", help="a run's folder, or its id in runs/")
    parser.add_argument("folder", metavar="DIR", help="a new or empty folder")
    parser.add_argument("--merge", action="store_true", help="put adapters into the weights")
    parser.add_argument(
        "--push", metavar="NAME", help="send DIR to this repository of the hub (made private)"
    )
    options = parser.parse_args(arguments)
    return print_once(export(options.run, options.folder, options.merge, options.push))
