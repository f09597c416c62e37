"""`eke report DIR...`: compare runs by their records, without torch or Hydra."""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from eke.cli import make_parser
from eke.common.errors import ConfigError, Fix, Problem
from eke.common.files import json_safe, open_trusted_dir, write_atomic
from eke.common.paths import short_path, user_path
from eke.common.screen import has_color, is_quiet, width, wrap
from eke.common.text import format_number
from eke.plan.record import EXIT_OK
from eke.plan.record.find_folder import find_folder
from eke.results.report.compare import Comparison, compare_runs

_FILE = "report.wandb.json"
_PUBLISHED_FILE = "report.wandb.published.json"


def _write_report(found: Comparison, options: argparse.Namespace, folder: Path) -> None:
    """Write the W&B report. Publish it with `--publish`. Raises EkeError or OSError."""
    if not (options.wandb or options.publish):
        if options.project or options.entity:
            sys.stderr.write("--project and --entity have no effect without --wandb or --publish\n")
        return
    from eke.results.report.wandb_report import dump, find_project, publish, specification

    place = find_project(found, options.project, options.entity)
    write_atomic(folder / _FILE, dump(specification(found, place)), shared=bool(options.output))
    hint = "" if options.publish else " (--publish saves it at W&B)"
    _told(options).write(f"written to {short_path(folder)}: {_FILE}{hint}\n")
    if not options.publish:
        return
    url, is_new, missing = publish(found, place, folder / _PUBLISHED_FILE)
    if missing:
        runs = format_number(missing, "run")
        places = [short_path(Path(folder)) for folder in found.folders]
        pairs = (("--project", options.project), ("--entity", options.entity))
        typed = shlex.join([*places, *[word for pair in pairs if pair[1] for word in pair]])
        sys.stderr.write(f"{runs} missing at W&B and in its panels -> eke sync {typed}\n")
    _told(options).write(f"{'published' if is_new else 'updated'}: {url}\n")


def _told(options: argparse.Namespace) -> TextIO:
    return sys.stderr if options.json else sys.stdout


_DESCRIPTION = """\
Compares runs: speed, memory and loss of every configuration and the baseline, with intervals over
repeats, the reasons of failed runs, and the effect of each technique.

Prints a table and writes report.html (one file for offline use), report.md, report.json and
report.csv into the first DIR. Unfinished sweeps and single runs are possible.
"""

_FORMATS = ("html", "md", "json", "csv")


def main(arguments: Sequence[str]) -> int:
    """Parse, compare, print and write. Return the exit code."""
    options = _parse(arguments)
    folders = [find_folder(each) for each in options.folders]
    found = compare_runs(folders, options.baseline, options.by)
    if options.json:
        sys.stdout.write(_render("json", found, options.repeats))
    elif not is_quiet():
        from eke.results.report.show.terminal import render_terminal

        everything = options.provenance or options.by in found.factors
        columns = width() if sys.stdout.isatty() else 160
        sys.stdout.write(render_terminal(found, options.repeats, has_color(), columns, everything))
    return _write(found, options)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("report", _DESCRIPTION)
    add = parser.add_argument
    add("folders", nargs="+", metavar="DIR", help="sweeps, runs, or folders of runs")
    add(
        "--baseline", default="", metavar="KEY=VALUE,...",
        help="configuration that others are compared with, or the name of a row "
        "(default: the row `baseline`, else the first that ended well)",
    )  # fmt: skip
    add(
        "--by", default="", metavar="KEY",
        help="show only effects of this technique (--by precision), or judge and sort rows by this "
        "metric (--by accuracy, --by loss)",
    )  # fmt: skip
    add("--json", action="store_true", help="print JSON, the content of report.json")
    add("--repeats", action="store_true", help="also list all runs")
    add(
        "--provenance", action="store_true",
        help="also print techniques, classes, and all devices, versions and commands",
    )  # fmt: skip
    add("--output", default="", metavar="FOLDER", help="folder for files (default: the first DIR)")
    add(
        "--formats", type=_formats, default=_FORMATS, metavar="LIST",
        help=f"files to write: any of {','.join(_FORMATS)}, or none (default: all)",
    )  # fmt: skip
    group = parser.add_argument_group("Weights & Biases")
    about = f"write {_FILE}, a W&B report, without a connection"
    group.add_argument("--wandb", action="store_true", help=about)
    about = "save the report at W&B, or update it"
    group.add_argument("--publish", action="store_true", help=about)
    for name in ("project", "entity"):
        about = f"default: the runs' tracker.{name}"
        group.add_argument(f"--{name}", default="", metavar="NAME", help=about)
    return parser.parse_args(arguments)


def _formats(text: str) -> tuple[str, ...]:
    asked = tuple(part.strip() for part in text.split(",")) if text != "none" else ()
    if unknown := [each for each in asked if each not in _FORMATS]:
        raise argparse.ArgumentTypeError(
            f"{unknown[0]!r} is not one of {', '.join(_FORMATS)}, none"
        )
    return asked


def _write(found: Comparison, options: argparse.Namespace) -> int:
    folder = user_path(options.output) if options.output else find_folder(options.folders[0])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open_trusted_dir(folder):  # `runs` may be a link of this user
            folder = folder.resolve()
        for name in options.formats:
            text = _render(name, found, options.repeats)
            write_atomic(folder / f"report.{name}", text, shared=bool(options.output))
    except OSError as error:
        # The problem is passing: another user's folder, or an archive.
        why = f"the report cannot be written: {error.strerror or error}"
        fix = Fix(remark="--output FOLDER   (or --formats none)")
        problem = Problem("--output", str(folder), why, fix, "not_writable", True)
        raise ConfigError(problem) from error
    if options.formats:
        names = ", ".join(f"report.{name}" for name in options.formats)
        told = "\n".join(wrap(f"written to {short_path(folder)}: {names}", width()))
        _told(options).write(f"{told}\n")
    _write_report(found, options, folder)
    return EXIT_OK


def _render(name: str, found: Comparison, repeats: bool) -> str:
    from eke.results.report.show import file_formats

    if name == "html":
        return file_formats.render_page(found, repeats)
    if name == "md":
        return file_formats.render_markdown(found, repeats)
    if name == "csv":
        return file_formats.as_csv(found)
    return json.dumps(json_safe(file_formats.as_plain(found)), indent=1, allow_nan=False) + "\n"
