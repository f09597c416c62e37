"""Split the command line into overrides and flags."""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.paths import program, user_path
from eke.config.compose.catalogue import (
    make_catalogue,
    suggest_match,
)
from eke.config.compose.check_overrides import find_problems, last_wins, secrets_in, suggest_fix
from eke.config.compose.suggest import suggest_value_for_key
from eke.config.foreign_names import find_retired

# Flags of Hydra 1.3.8 (hydra/_internal/utils.py, get_args_parser) -> number of values.
_HYDRA_FLAGS = {
    **dict.fromkeys(("--hydra-help", "--resolve", "--shell-completion", "-sc"), 0),
    **dict.fromkeys(("--cfg", "-c", "--package", "-p", "--config-path", "-cp"), 1),
    **dict.fromkeys(("--config-name", "-cn", "--experimental-rerun"), 1),
}
_INFO_FLAGS = ("--info", "-i")
LONG = {"-c": "--cfg", "-p": "--package", "-i": "--info"}
"""Short flag of Hydra -> long flag."""
FLAG_VALUES = {
    "--cfg": ("job", "hydra", "all"),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
}
"""Flag of Hydra -> allowed values."""
HELP = ("--help", "-h")
_RUN = ("--run", "-r")
"""Flags of Hydra for a single run, the default."""
_SWITCHES = {
    "--multirun": "multirun", "-m": "multirun", "--version": "version", "--cell": "cell",
}  # fmt: skip
CONFIG_DIR = ("--config-dir", "-cd")
"""Flags for the folder with the user's options."""
# Example values of flags for error messages.
_EXAMPLES = {"--cfg": "job", "-c": "job", "--package": "optimizer", "-p": "optimizer"}
# Flags of `eke plan`, which removes them before calling this parser.
_OF_PLAN = ("--why", "--quick", "--json")
_BYTE = re.compile("[\udc80-\udcff]")
"""Characters with which Python replaces bytes that are not UTF-8 (PEP 383)."""
# Every flag -> number of values.
_FLAGS = {
    **_HYDRA_FLAGS,
    **dict.fromkeys(_INFO_FLAGS, 1),
    **dict.fromkeys((*HELP, *_RUN, *_SWITCHES), 0),
    **dict.fromkeys(CONFIG_DIR, 1),
}


@dataclass(frozen=True)
class Arguments:
    """Parsed command line."""

    overrides: tuple[str, ...] = ()
    """`key=value` in command-line order, each key once."""
    verbose: str = ""
    """Comma-separated loggers of `hydra.verbose`. `root` is all."""
    warnings: tuple[str, ...] = ()
    """Warnings about overrides that a later override of the same key replaces."""
    help: str | None = None
    """Topic of --help or -h, empty for the first page. None: without the flag."""
    version: bool = False
    multirun: bool = False
    """True if --multirun or -m is given: the overrides span a sweep."""
    cell: bool = False
    """True if --cell is given: the overrides are one run of the sweep they name."""
    config_dir: Path | None = None
    hydra_flags: tuple[str, ...] = ()
    """Hydra's flags and their values, unchanged."""


@dataclass
class _Reader:
    """Remaining words of the command line, and the problems so far."""

    tokens: list[str]
    problems: list[Problem] = field(default_factory=list)

    def value(self, flag: str, inline: str | None) -> str:
        """Return the value of a flag: the text after `=`, else the next word."""
        if inline is not None:
            return inline
        if self.tokens and not self.tokens[0].startswith("-"):
            return self.tokens.pop(0)
        example = Fix(remark=f"{flag} {_EXAMPLES.get(flag, 'FOLDER')}")
        self.problems.append(Problem(flag, "", f"{flag} needs a value", example, "missing_value"))
        return ""


def split_arguments(argv: Sequence[str], also: Mapping[str, int] | None = None) -> Arguments:
    """Split a command line. `also` maps the command's own flags to their number of values."""
    if unreadable := [_no_utf8(token) for token in argv if _BYTE.search(token)]:
        raise ConfigError(unreadable)
    typed = [dict([token.lstrip("+").partition("=")[::2]]) for token in argv]
    if secret := [problem for each in typed for problem in secrets_in(each)]:
        raise ConfigError(secret)
    words = [token.lstrip("-+") for token in argv]
    if any(word.startswith("cfg={") for word in words):
        # https://github.com/wandb/wandb/issues/9143
        valid = [word for word in words if not find_problems(word, make_catalogue())]
        why = "is a logged configuration (W&B agents restart a run with it). Use its overrides"
        command = Fix(remark=shlex.join([*program().split(), *valid]))
        raise ConfigError(Problem("cfg", "{...}", why, command, "logged_configuration"))
    found, reader = Arguments(), _Reader(list(argv))
    while reader.tokens:
        token = reader.tokens.pop(0)
        if token.startswith("-") and token not in ("-", "--"):
            found = _read_flag(token, found, reader, also or {})
        elif token != "--":
            found = replace(found, overrides=(*found.overrides, token))
    if reader.problems:
        raise ConfigError(reader.problems)
    kept, warnings = last_wins(found.overrides, make_catalogue())
    verbose = [text for text in kept if text.lstrip("+").startswith("hydra.verbose=")]
    rest, loggers = tuple(text for text in kept if text not in verbose), map(_loggers, verbose)
    return replace(found, overrides=rest, verbose=",".join(loggers), warnings=tuple(warnings))


def _loggers(text: str) -> str:
    """Return the loggers of `hydra.verbose=...`, parsed as in hydra/core/utils.py."""
    raw = text.partition("=")[2]
    if not re.fullmatch(r"\[[\w., ]*\]|[A-Za-z_][\w.]*", raw):
        why, fix = "must be true, false, a logger or a list of loggers", Fix("hydra.verbose=true")
        raise ConfigError(Problem("hydra.verbose", raw, why, fix, "wrong_type"))
    names = raw.strip("[]").replace(" ", "")
    return {"true": "root", "false": ""}.get(names.lower(), names)


def _no_utf8(token: str) -> Problem:
    """Return the problem of a word that is not UTF-8. Plans, records and trackers store text."""
    typed = _BYTE.sub(lambda sign: f"\\x{os.fsencode(sign[0]).hex()}", token)
    return Problem("a word", typed, "is not UTF-8", Fix(_BYTE.sub("_", token)), "not_utf8")


def _read_flag(token: str, found: Arguments, reader: _Reader, also: Mapping[str, int]) -> Arguments:
    flag, equals, rest = token.partition("=")
    inline = rest if equals else None
    if flag in _SWITCHES and inline is None:
        switched: dict[str, Any] = {_SWITCHES[flag]: True}
        return replace(found, **switched)
    if flag in _RUN and inline is None:
        return found
    if flag in HELP:
        topic = re.fullmatch(r"(\w[\w.]*)(=\w+)?", "".join(reader.tokens[:1]))
        named = topic and (not topic[2] or topic[1] in make_catalogue().options)
        return replace(found, help=inline or (reader.tokens.pop(0) if named else ""))
    if flag in CONFIG_DIR:
        return replace(found, config_dir=user_path(reader.value(flag, inline)))
    if flag in _HYDRA_FLAGS:
        values = [reader.value(flag, inline) for _ in range(_HYDRA_FLAGS[flag])]
        return replace(found, hydra_flags=(*found.hydra_flags, flag, *values))
    if flag in _INFO_FLAGS:
        # A word that is neither a flag nor an override is a (misspelt) topic of --info.
        follows = reader.tokens and not re.match(r"-|~|[^=]*=", reader.tokens[0])
        values = [inline] if inline else [reader.tokens.pop(0)] if follows else []
        return replace(found, hydra_flags=(*found.hydra_flags, flag, *values))
    reader.problems.append(_unknown_flag(flag, inline, found, reader, also))
    return found


def _unknown_flag(
    flag: str, inline: str | None, found: Arguments, reader: _Reader, also: Mapping[str, int]
) -> Problem:
    """Return the problem of `--precision bf16`, `--lr=0.1` or `--fp16`, with the override."""
    value, catalogue = inline, make_catalogue()
    takes_next = reader.tokens and "=" not in reader.tokens[0]
    if value is None and takes_next and not reader.tokens[0].startswith("--"):
        value = reader.tokens.pop(0)
    name, of_command = flag.lstrip("-"), _near_flag(flag, also)
    long_flag = of_command or _near_flag(flag, _FLAGS)
    override = f"{name.replace('-', '_')}={'true' if value is None else value}"
    is_a_setting = find_retired(name) or suggest_value_for_key(name, catalogue)
    if long_flag and (of_command or not is_a_setting):
        follows = f" {value}" if value and {**_FLAGS, **also}[long_flag] else ""
        why = "takes no value" if flag == long_flag else "unknown flag"
        return Problem(flag, value or "", why, Fix(remark=f"{long_flag}{follows}"), "unknown_flag")
    if flag in _OF_PLAN:
        rest = [t for t in (*found.overrides, *reader.tokens) if t != "plan_only=true"]
        command = shlex.join(["eke", "plan", flag, *rest])
        return Problem(flag, "", "is a flag of eke plan", Fix(remark=command), "unknown_flag")
    fix = suggest_fix(override, catalogue)
    why = "unknown flag. Settings are key=value without dashes"
    if not fix:
        flags = ", ".join([*also, "-m", "--config-dir FOLDER", "--cfg job", "--help", "--version"])
        why = f"unknown flag or setting. Flags: {flags}"
    return Problem(flag, value or "", why, fix, "unknown_flag")


def _near_flag(flag: str, known: Mapping[str, int]) -> str | None:
    return suggest_match(flag, [each for each in known if each.startswith("--")])
