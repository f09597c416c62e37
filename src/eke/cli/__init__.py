"""The `eke` command: parse arguments and print results.

Input: `sys.argv`. Output: text or JSON on standard output, and the exit code. Begin with `main`.
Each other module is one subcommand.
"""

import argparse
import re
import shlex
import sys
from collections.abc import Callable
from importlib import import_module
from typing import NoReturn

from eke.common.errors import ConfigError, EkeError, Fix, Problem, format_os_error
from eke.common.masking import mask
from eke.common.output import (
    open_streams,
    output_was_lost,
    print_problems_json,
    use_utf8,
    write_line,
)
from eke.common.process_env import ensure_home
from eke.common.python_runtime import relax_gc
from eke.common.screen import COLOR_CHOICES, fields, paint, take_flags, width, wrap
from eke.common.text import suggest_match
from eke.plan.record import EXIT_FAILED, EXIT_OK, EXIT_RESUMABLE

_COMMANDS = {
    "train [overrides]": "train one run, or with -m a sweep (python train.py in a checkout)",
    "plan [overrides]": "show whether it fits, memory, time and all decisions, without training",
    "fit [overrides]": "find the fastest configuration that fits, by a few short trials",
    "show WHAT": "explain a key, option or group, or print all figures of a run",
    "data show ...": "show the first rows and mark the trained tokens",
    "schema [FOLDER]": "write JSON schemas of the option files for editors",
    "doctor": "show the properties of this machine and its usable options",
    "status DIR": "show the progress of runs (--live: update until all end)",
    "logs DIR": "show the last log lines of running and failed runs (-f: follow)",
    "cancel DIR": "stop runs after saving. Repeat the command to resume them",
    "retry DIR": "rerun crashed, diverged and out-of-memory runs",
    "report DIR...": "compare runs: which techniques help, how much, and how certainly",
    "compare A B": "test whether B is slower: runs, sweeps, commits or versions",
    "export RUN DIR": "write the model of a run for transformers, PEFT or the Hub",
    "generate RUN PROMPT": "generate text with a trained model, or chat with it",
    "evaluate RUN": "compute loss and metrics of a trained model, also on other data",
    "sync RUNS...": "send runs to Weights & Biases and verify them",
}
"""Command and its arguments -> description."""

_OWN_MODULE = ("plan", "report", "compare", "fit", "schema", "doctor", "sync", "show")
"""Commands with a module of the same name, imported when needed."""

_SHARED_MODULE = {
    "data": "data_show",
    **dict.fromkeys(("export", "generate", "evaluate"), "models"),
    **dict.fromkeys(("status", "logs", "cancel", "retry"), "run_commands"),
}
"""Command -> module for several commands, whose `main` also takes the command's name."""

HELP_FLAGS = ("--help", "-h")

_NAMES = tuple(each.partition(" ")[0] for each in _COMMANDS)


def main(arguments: list[str] | None = None) -> int:
    """Run the console script and return the exit code."""
    if arguments is None:
        use_utf8()
    open_streams()
    ensure_home()
    relax_gc()
    typed = take_flags(sys.argv[1:] if arguments is None else arguments)
    try:
        code = _run_command(typed)
    except (EkeError, OSError) as error:  # OSError: e.g. a full disk, or a deleted folder
        shown = error if isinstance(error, EkeError) else EkeError(format_os_error(error))
        if "--json" in typed:
            print_problems_json(shown)
        sys.stderr.write(f"{shown.screen(sys.stderr, ['eke', *typed])}\n")
        return shown.exit_code
    except KeyboardInterrupt:
        return EXIT_RESUMABLE
    only_answers = typed[:1] not in (["train"], ["fit"], ["retry"])
    return EXIT_FAILED if code == EXIT_OK and only_answers and output_was_lost() else code


def _run_command(arguments: list[str]) -> int:
    for wrong in (each for each in arguments if each.startswith("--color=")):
        value, why = wrong.partition("=")[2], f"must be one of {', '.join(COLOR_CHOICES)}"
        raise ConfigError(
            Problem("--color", value, why, Fix(remark="--color=auto"), "wrong_argument")
        )
    command, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if command in HELP_FLAGS:
        write_line(_usage())
        return EXIT_OK
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

        sys.stdout.write(answer_shell(rest, _NAMES))
        return EXIT_OK
    if command not in ("train", "--version"):
        raise ConfigError(_unknown_command(command, rest))
    from eke import workflows

    return workflows.main(rest if command == "train" else ["--version"])


def _unknown_command(command: str, rest: list[str]) -> Problem:
    """Suggest the intended command, or `train` if the word is an override."""
    meant = suggest_match(command, _NAMES)
    typed = ["train", command] if "=" in command else [meant] if meant else []
    why = f"unknown command. Commands: {', '.join(_NAMES)}"
    if typed:
        fix = shlex.join(["eke", *typed, *rest])
        why = "is an override" if "=" in command else "unknown command"
    else:
        fix = "eke --help"
    return Problem(f"eke {mask(command)}", "", why, Fix(remark=mask(fix)), "unknown_command")


def _usage() -> str:
    columns = min(width(), 100)
    about = "eke: find, run and compare training recipes that use the available GPUs efficiently"
    rows = [(paint(f"eke {command}", "cyan"), text) for command, text in _COMMANDS.items()]
    ends = [
        "All take -q (result only), -v (details), --json and --color auto|always|never. "
        "Flags of a command: eke COMMAND --help. Version: eke --version",
        "Overrides and options: eke train --help. One group: eke train --help GROUP",
    ]
    blocks = [wrap(about, columns), fields(rows, columns, 2, 28)]
    blocks += [wrap(text, columns) for text in ends]
    return "\n\n".join("\n".join(lines) for lines in blocks)


class _Formatter(argparse.HelpFormatter):
    """Help at the width of the terminal. Indented paragraphs of a description keep their lines."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrap(" ".join(text.split()), width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return reflow(text, width)


def reflow(text: str, columns: int) -> str:
    """Wrap paragraphs. Lines of an indented one remain, with a text below its name if too long."""
    lines: list[str] = []
    for paragraph in text.strip("\n").split("\n\n"):
        if any(line.startswith(" ") for line in paragraph.split("\n")):
            for line in paragraph.split("\n"):
                name, gap, about = line.strip().partition("   ")
                is_long = gap and len(line) > columns
                lines += fields([(name, about.strip())], columns, 2) if is_long else [line]
        else:
            lines += wrap(" ".join(paragraph.split()), columns)
        lines.append("")
    return "\n".join(lines[:-1])


class _Parser(argparse.ArgumentParser):
    """Parser whose errors look like all others."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(self._argument_problem(message))

    def _argument_problem(self, message: str) -> Problem:
        fix = Fix(remark=f"{self.prog} --help")
        if match := re.fullmatch(r"unrecognized arguments: (.+)", message):
            flag, _, value = match[1].partition(" ")[0].partition("=")
            known = [each for each in self._option_string_actions if each.startswith("--")]
            near = suggest_match(flag, known)
            why = "unknown flag" if flag.startswith("-") else "unexpected argument"
            flags = f". Flags: {', '.join(known)}" if not near else ""
            fix = Fix(remark=f"{near}={value}" if value else near) if near else fix
            return Problem(flag, value, why + flags, fix, "unknown_flag")
        if match := re.fullmatch(r"the following arguments are required: (.+)", message):
            usage = " ".join(self.format_usage().split()).removeprefix("usage: ")
            return Problem(match[1], "", f"is missing. Usage: {usage}", fix, "missing_argument")
        if match := re.fullmatch(r"argument (\S+): invalid choice: '?(.*?)'? \(.*\)", message):
            key, value = match[1].split("/")[-1], match[2]
            action = next((a for a in self._actions if a.choices and key in _names(a)), None)
            options = [str(each) for each in action.choices or ()] if action else []
            near = suggest_match(value, options) or next(iter(options), "")
            fix = Fix(remark=f"{key} {near}" if key.startswith("-") else near)
            return Problem(key, value, f"must be one of {', '.join(options)}", fix, "wrong_value")
        key, _, why = message.removeprefix("argument ").partition(": ")
        has_key = message.startswith("argument ") and why
        return Problem(
            key.split("/")[-1] if has_key else self.prog, "", why if has_key else message, fix,
            "wrong_argument",
        )  # fmt: skip


def _names(action: argparse.Action) -> list[str]:
    return [*action.option_strings, str(action.metavar or action.dest)]


def make_parser(command: str, description: str) -> argparse.ArgumentParser:
    """Return a parser of `eke COMMAND`, whose errors are ConfigErrors."""
    return _Parser(f"eke {command}", description=description, formatter_class=_Formatter)


def whole_number(lowest: int) -> Callable[[str], int]:
    """Return a type for argparse: a whole number from `lowest`."""

    def number(text: str) -> int:
        if (value := int(text)) < lowest:
            raise argparse.ArgumentTypeError(f"{text} is below {lowest}")
        return value

    return number
