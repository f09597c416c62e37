"""`eke report --wandb` and `--publish`: what is typed, and what is said."""

import argparse
import os
import shlex
import sys
from pathlib import Path

from eke.common.files import write_atomic
from eke.common.units import format_number
from eke.results.report.compare import Comparison

FILE = "report.wandb.json"
PUBLISHED_FILE = "report.wandb.published.json"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of a report at W&B."""
    group = parser.add_argument_group("Weights & Biases")
    group.add_argument(
        "--wandb", action="store_true", help=f"write {FILE}, a W&B report; no connection is made"
    )
    group.add_argument(
        "--publish", action="store_true", help="save it at W&B, the same report when typed again"
    )
    group.add_argument(
        "--project", default="", metavar="NAME", help="default: the runs' tracker.project"
    )
    group.add_argument(
        "--entity", default="", metavar="NAME", help="default: the runs' tracker.entity"
    )


def write_report(found: Comparison, options: argparse.Namespace, folder: Path) -> None:
    """Write the specification; publish it if asked.

    Raises:
        EkeError: a package or a key is missing, or the server does not take it.
        OSError: a file cannot be written.
    """
    if not (options.wandb or options.publish):
        if options.project or options.entity:
            sys.stderr.write("--project and --entity have no effect without --wandb or --publish\n")
        return
    from eke.results.report.wandb.place import find_place
    from eke.results.report.wandb.specification import dump, specification

    place = find_place(found, options.project, options.entity)
    text = dump(specification(found, place, options.repeats))
    write_atomic(folder / FILE, text, shared=bool(options.output))
    hint = "" if options.publish else "; --publish saves it at W&B"
    sys.stdout.write(f"written to {folder}: {FILE}{hint}\n")
    if not options.publish:
        return
    from eke.results.report.wandb.publish import publish

    saved = publish(found, place, folder / PUBLISHED_FILE, options.repeats)
    if saved.missing:
        runs = format_number(saved.missing, "run")
        typed = shlex.join([*map(_short, found.folders), *_named(options)])
        sys.stderr.write(
            f"{runs} without a sign of being at W&B: panels lack them -> eke sync {typed}\n"
        )
    said = "published" if saved.is_new else "updated"
    sys.stdout.write(f"{said}: {saved.published.url}\n")


def _short(folder: str) -> str:
    """A path as one would type it here."""
    relative = os.path.relpath(folder)
    return folder if relative.startswith("..") else relative


def _named(options: argparse.Namespace) -> list[str]:
    """The place that was typed, for another command."""
    pairs = (("--project", options.project), ("--entity", options.entity))
    return [word for name, value in pairs if value for word in (name, value)]
