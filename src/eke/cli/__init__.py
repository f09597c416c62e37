"""The `eke` command: parse arguments and print results.

Input: `sys.argv`. Output: text or JSON on standard output, and the exit code. Begin with `main`.
Each other module is one subcommand.
"""

import argparse
import shlex
import sys
from collections.abc import Callable
from importlib import import_module

from eke.common.errors import EkeError, format_os_error
from eke.common.masking import mask
from eke.common.output import open_streams, output_was_lost, print_problems_json, use_utf8
from eke.common.process_env import ensure_home
from eke.common.python_runtime import relax_gc
from eke.common.screen import take_flags
from eke.common.text import suggest_match
from eke.plan.record import EXIT_FAILED, EXIT_OK, EXIT_RESUMABLE, EXIT_USER

USAGE = """\
eke: find, run and compare training recipes that use the available GPUs efficiently

  eke train [overrides]    train one run, or with -m a sweep (python train.py in a checkout)
  eke plan [overrides]     show all decisions with reasons and the memory, without training
                           (--json)
                           (--why: largest memory use, and overrides that reduce it)
                           (--quick: use formulas if there is no cached trace)
                           (hardware=all: on every known GPU. Details: eke plan --help)
  eke fit [overrides]      find the fastest configuration that fits, by rules, forecasts and
                           a few short trials. Details: eke fit --help
  eke data show ...        show the first rows and mark the trained tokens (eke data --help)
  eke schema [FOLDER]      write JSON schemas of the option files for editors
  eke doctor               show the properties of this machine and its usable options
                           (--json)
  eke status DIR           show the progress of runs, on this machine or in a cluster
                           (--live: update until all end, --json)
  eke logs DIR             show the last log lines of running and failed runs (-f: follow)
  eke cancel DIR           stop runs after saving. Repeat the command to resume them
  eke retry DIR            rerun crashed, diverged and out-of-memory runs
  eke report DIR...        compare runs: which techniques help, by how much, with what certainty
                           (--publish: at Weights & Biases. Details: eke report --help)
  eke compare A B          test whether B is slower: two runs, sweeps, commits or versions
                           (exit code 1: slower. --again measures both. eke compare --help)
  eke export RUN DIR       write the model of a finished run for transformers, PEFT or the Hub
                           (--merge: merge adapters. Details: eke export --help)
  eke generate RUN PROMPT  generate text with a trained model, or chat with it
                           (eke generate --help)
  eke evaluate RUN         compute loss and metrics of a trained model, also on other data
                           (data.path=test.csv. Details: eke evaluate --help)
  eke sync RUNS...         send runs to Weights & Biases and verify them
                           (eke sync --help)
  eke --version

Overrides and options: eke train --help   (one group: eke train --help GROUP)
"""

_OWN_MODULE = ("plan", "report", "compare", "fit", "schema", "doctor", "sync")
"""Commands with a module of the same name, imported when needed."""

_SHARED_MODULE = {
    "data": "data_show",
    **dict.fromkeys(("export", "generate", "evaluate"), "models"),
    **dict.fromkeys(("status", "logs", "cancel", "retry"), "run_commands"),
}
"""Command -> module for several commands, whose `main` also takes the command's name."""

HELP_FLAGS = ("--help", "-h")

_COMMANDS = ("train", *_OWN_MODULE, *_SHARED_MODULE)


def main(arguments: list[str] | None = None) -> int:
    """Run the console script and return the exit code."""
    if arguments is None:
        use_utf8()
    open_streams()
    ensure_home()
    relax_gc()
    typed = take_flags(sys.argv[1:] if arguments is None else arguments)
    try:
        code = _do(typed)
    except EkeError as error:
        if "--json" in typed:
            print_problems_json(error)
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except OSError as error:  # e.g. a full disk, or a deleted or read-only folder
        sys.stderr.write(f"{format_os_error(error)}\n")
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_RESUMABLE
    only_answers = typed[:1] not in (["train"], ["fit"], ["retry"])
    return EXIT_FAILED if code == EXIT_OK and only_answers and output_was_lost() else code


def _do(arguments: list[str]) -> int:
    command, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if command in _OWN_MODULE:
        return int(import_module(f"eke.cli.{command}").main(rest))
    if command in _SHARED_MODULE:
        return int(import_module(f"eke.cli.{_SHARED_MODULE[command]}").main(command, rest))
    # Import here, so that Ctrl-C during the import prints no traceback.
    from eke.config.compose.completion import COMPLETION_FLAGS

    if command == "train" and any(word.partition("=")[0] in HELP_FLAGS for word in rest):
        # Avoid the import of planning and training code.
        from eke.config.compose import help_text, split_arguments

        asked = split_arguments(rest)
        sys.stdout.write(f"{help_text(asked.config_dir, asked.help or '')}\n")
        return EXIT_FAILED if output_was_lost() else EXIT_OK
    if command in COMPLETION_FLAGS:
        from eke.config.compose import answer_shell

        sys.stdout.write(answer_shell(rest, _COMMANDS))
        return EXIT_OK
    if command in HELP_FLAGS:
        return _usage(0)
    if command not in ("train", "--version"):
        return _unknown(command, rest)
    from eke import workflows

    return workflows.main(rest if command == "train" else ["--version"])


def _unknown(command: str, rest: list[str]) -> int:
    """Suggest the intended command, or `train` if the word is an override."""
    typed = ["train", command] if "=" in command else [suggest_match(command, _COMMANDS)]
    if typed[0] is None:
        sys.stderr.write(f"eke: unknown command {command!r}\n\n")
        return _usage(EXIT_USER)
    again = mask(shlex.join(["eke", *filter(None, typed), *rest]))
    sys.stderr.write(f"eke: unknown command {mask(command)!r}\n  -> {again}\n")
    return EXIT_USER


def _usage(code: int) -> int:
    (sys.stdout if code == 0 else sys.stderr).write(USAGE)
    return code


def make_parser(command: str, description: str) -> argparse.ArgumentParser:
    """Return a parser of `eke COMMAND` that keeps the line breaks of its description."""
    return argparse.ArgumentParser(
        f"eke {command}", description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip


def whole_number(lowest: int) -> Callable[[str], int]:
    """Return a type for argparse: a whole number from `lowest`."""

    def number(text: str) -> int:
        if (value := int(text)) < lowest:
            raise argparse.ArgumentTypeError(f"{text} is below {lowest}")
        return value

    return number
