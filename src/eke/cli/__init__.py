"""The `eke` command: argument parsing and printing only."""

import argparse
import shlex
import sys
from collections.abc import Callable
from importlib import import_module

from eke.common.errors import EkeError, of_system
from eke.common.masking import mask
from eke.common.process_env import ensure_home
from eke.common.runtime import collect_seldom
from eke.common.streams import lost, open_streams, speak_problems, use_utf8
from eke.common.text import closest
from eke.plan.record import EXIT_FAILED, EXIT_OK, EXIT_RESUMABLE, EXIT_USER

USAGE = """\
eke: find, run and compare the training recipes that get the most out of your GPUs

  eke train [overrides]    one run, or with -m a sweep (python train.py in a checkout)
  eke plan [overrides]     every derived decision with its reason, and the memory
                           it takes; nothing is run (--json: for machines)
                           (--why: what dominates, and what would make it fit)
                           (--quick: memory by formulas, if no trace is kept)
                           (hardware=all: on every known GPU; eke plan --help)
  eke fit [overrides]      the fastest configuration that fits: rules and forecasts, then
                           a few short trials; written as an experiment (eke fit --help)
  eke data show ...        the first rows as text, with what is trained (eke data --help)
  eke schema [FOLDER]      JSON schemas of the option files, for editors
  eke doctor               what this machine has, and which options can run on it
                           (--json: for machines)
  eke status DIR           how far the runs of a sweep are, here or in a cluster
                           (--live: as they go on; --json)
  eke logs DIR             the ends of the logs of what runs or failed (-f: as they grow)
  eke cancel DIR           asks runs to save and end; the same command continues them
  eke retry DIR            runs again what crashed, diverged or ran out of memory
  eke report DIR...        which techniques pay, by how much, and how sure that is
                           (eke report --help; --publish: at Weights & Biases)
  eke compare A B          whether B is slower: two runs, sweeps, commits or versions
                           (exit code 1: it is; --again measures both; eke compare --help)
  eke export RUN DIR       the model of a finished run, for transformers, PEFT or the hub
                           (--merge: adapters in the weights; eke export --help)
  eke generate RUN PROMPT  what a trained model writes, or a conversation with it
                           (eke generate --help)
  eke evaluate RUN         loss and metrics of a trained model, also on other data
                           (data.path=test.csv; eke evaluate --help)
  eke sync RUNS...         send runs to Weights & Biases, and see that they arrived
                           (eke sync --help)
  eke --version

Overrides and options: eke train --help   (of one group: eke train --help GROUP)
"""

_OWN_MODULE = ("plan", "report", "compare", "fit", "schema", "doctor", "sync")
"""Commands with a module of the same name, imported only when needed."""

_SHARED_MODULE = {
    "data": "data_show",
    **dict.fromkeys(("export", "generate", "evaluate"), "models"),
    **dict.fromkeys(("status", "logs", "cancel", "retry"), "run_commands"),
}
"""Other commands -> the module whose `main` takes the command's name, too."""

HELP_FLAGS = ("--help", "-h")

_COMMANDS = ("train", *_OWN_MODULE, *_SHARED_MODULE)


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    if arguments is None:
        use_utf8()
    open_streams()
    ensure_home()
    collect_seldom()
    typed = sys.argv[1:] if arguments is None else arguments
    try:
        code = _do(typed)
    except EkeError as error:
        if "--json" in typed:
            speak_problems(error)
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except OSError as error:  # the disk is full, or a folder is not writable or was deleted
        sys.stderr.write(f"{of_system(error)}\n")
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_RESUMABLE
    only_answers = typed[:1] not in (["train"], ["fit"], ["retry"])
    return EXIT_FAILED if code == EXIT_OK and only_answers and lost() else code


def _do(arguments: list[str]) -> int:
    command, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if command in _OWN_MODULE:
        return int(import_module(f"eke.cli.{command}").main(rest))
    if command in _SHARED_MODULE:
        return int(import_module(f"eke.cli.{_SHARED_MODULE[command]}").main(command, rest))
    # Imported here so that Ctrl-C during the import prints no traceback.
    from eke.config.compose.completion import COMPLETION_FLAGS

    if command == "train" and any(word.partition("=")[0] in HELP_FLAGS for word in rest):
        # Planning and training code is not imported.
        from eke.config.compose import help_text, split_arguments

        asked = split_arguments(rest)
        sys.stdout.write(f"{help_text(asked.config_dir, asked.help or '')}\n")
        return EXIT_FAILED if lost() else EXIT_OK
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
    """Suggest the intended command, or `train` if overrides follow without one."""
    typed = ["train", command] if "=" in command else [closest(command, _COMMANDS)]
    if typed[0] is None:
        sys.stderr.write(f"eke: no command {command!r}\n\n")
        return _usage(EXIT_USER)
    again = mask(shlex.join(["eke", *filter(None, typed), *rest]))
    sys.stderr.write(f"eke: no command {mask(command)!r}\n  -> {again}\n")
    return EXIT_USER


def _usage(code: int) -> int:
    (sys.stdout if code == 0 else sys.stderr).write(USAGE)
    return code


def make_parser(command: str, description: str) -> argparse.ArgumentParser:
    """Parser of `eke COMMAND`, with the line breaks of its description."""
    return argparse.ArgumentParser(
        f"eke {command}", description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip


def whole_number(lowest: int) -> Callable[[str], int]:
    """Type of an option of argparse: a whole number from `lowest` on."""

    def number(text: str) -> int:
        if (value := int(text)) < lowest:
            raise argparse.ArgumentTypeError(f"{text} is too few: {lowest} or more")
        return value

    return number
