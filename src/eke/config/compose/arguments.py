"""The command line before Hydra sees it: overrides, eke's flags, Hydra's flags."""

import difflib
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from eke.common.errors import ConfigError, Problem
from eke.common.paths import user_path
from eke.config.compose.catalogue import Catalogue, make_catalogue
from eke.config.compose.overrides import mend
from eke.config.compose.secrets import secrets_in
from eke.config.compose.suggest import completed
from eke.config.foreign_names import find_retired

# Hydra 1.3.8's own flags (hydra/_internal/utils.py, get_args_parser) -> values that follow.
_HYDRA_FLAGS = {
    "--hydra-help": 0,
    "--resolve": 0,
    "--run": 0,
    "-r": 0,
    "--shell-completion": 0,
    "-sc": 0,
    "--cfg": 1,
    "-c": 1,
    "--package": 1,
    "-p": 1,
    "--config-path": 1,
    "-cp": 1,
    "--config-name": 1,
    "-cn": 1,
    "--experimental-rerun": 1,
}
_INFO_FLAGS = ("--info", "-i")
INFO_VALUES = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
"""What --info can be asked for, besides nothing."""
_SWITCHES = {
    "--help": "help",
    "-h": "help",
    "--multirun": "multirun",
    "-m": "multirun",
    "--version": "version",
    "--cell": "cell",
}
_CONFIG_DIR = ("--config-dir", "-cd")
# A value that a flag can have, for who typed none.
_EXAMPLES = {
    "--cfg": "job",
    "-c": "job",
    "--package": "optimizer",
    "-p": "optimizer",
    "--config-dir": "FOLDER",
    "-cd": "FOLDER",
}
# Known to `eke plan` alone, which takes them away before this.
_OF_PLAN = ("--why", "--quick", "--json")
_BYTE = re.compile("[\udc80-\udcff]")
"""What Python puts in the place of a byte that is no UTF-8 (PEP 383)."""
# Every flag -> values that follow.
_FLAGS = {
    **_HYDRA_FLAGS,
    **dict.fromkeys(_INFO_FLAGS, 1),
    **dict.fromkeys(_SWITCHES, 0),
    **dict.fromkeys(_CONFIG_DIR, 1),
}


@dataclass(frozen=True)
class Arguments:
    """A command line, sorted."""

    overrides: tuple[str, ...] = ()
    """`key=value`, in the order typed."""
    help: bool = False
    """--help, -h."""
    version: bool = False
    """--version."""
    multirun: bool = False
    """--multirun, -m: the overrides span a sweep."""
    cell: bool = False
    """--cell: the overrides are those of one run of the sweep that they name."""
    config_dir: Path | None = None
    """--config-dir, -cd: a folder with the user's own options."""
    hydra_flags: tuple[str, ...] = ()
    """Hydra's own flags with their values, as typed."""


@dataclass
class _Reader:
    """The tokens that are left, and what was found in those before."""

    tokens: list[str]
    overrides: list[str] = field(default_factory=list)
    hydra_flags: list[str] = field(default_factory=list)
    switches: set[str] = field(default_factory=set)
    config_dir: Path | None = None
    problems: list[Problem] = field(default_factory=list)

    def value(self, flag: str, inline: str | None) -> str:
        """The value of a flag: behind its `=`, else the next token."""
        if inline is not None:
            return inline
        if self.tokens and not self.tokens[0].startswith("-"):
            return self.tokens.pop(0)
        example = f"{flag} {_EXAMPLES.get(flag, 'VALUE')}"
        self.problems.append(Problem(flag, "", f"{flag} needs a value", example))
        return ""


def split_arguments(argv: Sequence[str], also: Mapping[str, int] | None = None) -> Arguments:
    """Sort a command line (without the program's name) into overrides and flags.

    Args:
        argv: without the flags that the command itself knows.
        also: these flags (`--why` of `eke plan`), one of which may have been misspelt, and how
            many values follow each.

    Raises:
        ConfigError: flags that nobody knows, each with its `key=value` form.
    """
    if unreadable := [_no_utf8(token) for token in argv if _BYTE.search(token)]:
        raise ConfigError(unreadable)
    typed = [dict([token.lstrip("+").partition("=")[::2]]) for token in argv]
    if secret := [problem for each in typed for problem in secrets_in(each)]:
        raise ConfigError(secret)
    reader = _Reader(list(argv))
    catalogue = make_catalogue()
    while reader.tokens:
        token = reader.tokens.pop(0)
        if token == "--":
            continue
        if token.startswith("-") and token != "-":
            _read_flag(token, reader, catalogue, also or {})
        else:
            reader.overrides.append(token)
    if reader.problems:
        raise ConfigError(reader.problems)
    return Arguments(
        overrides=tuple(reader.overrides),
        help="help" in reader.switches,
        version="version" in reader.switches,
        multirun="multirun" in reader.switches,
        cell="cell" in reader.switches,
        config_dir=reader.config_dir,
        hydra_flags=tuple(reader.hydra_flags),
    )


def _no_utf8(token: str) -> Problem:
    """Plans, records and trackers hold text: a name of other bytes has no place there."""
    start = token.find("=") + 1
    key, name = token[:start], token[start:]
    typed = re.sub(r"[\udc80-\udcff'\\]", lambda sign: f"\\x{os.fsencode(sign[0]).hex()}", name)
    new = _BYTE.sub("_", name)
    rename = f"   (after mv $'{typed}' {shlex.quote(new)})" if os.path.lexists(name) else ""
    fix = f"{shlex.quote(key + new)}{rename}"
    return Problem(key[:-1] or "a word", typed, "is no UTF-8 text, which eke's files hold", fix)


def _read_flag(token: str, reader: _Reader, catalogue: Catalogue, also: Mapping[str, int]) -> None:
    flag, equals, rest = token.partition("=")
    inline = rest if equals else None
    if flag in _SWITCHES and inline is None:
        reader.switches.add(_SWITCHES[flag])
    elif flag in _CONFIG_DIR:
        reader.config_dir = user_path(reader.value(flag, inline))
    elif flag in _HYDRA_FLAGS:
        needed = _HYDRA_FLAGS[flag]
        reader.hydra_flags += [flag] + [reader.value(flag, inline) for _ in range(needed)]
    elif flag in _INFO_FLAGS:
        # A word that is neither a flag nor an override is meant for --info, misspelt or not.
        follows = reader.tokens and not re.match(r"-|~|[^=]*=", reader.tokens[0])
        values = [inline] if inline else [reader.tokens.pop(0)] if follows else []
        reader.hydra_flags += [flag, *values]
    else:
        reader.problems.append(_unknown_flag(flag, inline, reader, catalogue, also))


def _unknown_flag(
    flag: str, inline: str | None, reader: _Reader, catalogue: Catalogue, also: Mapping[str, int]
) -> Problem:
    """`--precision bf16`, `--lr=0.1`, `--fp16`: say it as Hydra wants it."""
    value = inline
    takes_next = reader.tokens and "=" not in reader.tokens[0]
    if value is None and takes_next and not reader.tokens[0].startswith("--"):
        value = reader.tokens.pop(0)
    name = flag.lstrip("-")
    of_command = _near_flag(flag, also)
    long_flag = of_command or _near_flag(flag, _FLAGS)
    override = f"{name.replace('-', '_')}={'true' if value is None else value}"
    is_a_setting = find_retired(name) or completed(name, catalogue)
    if long_flag and (of_command or not is_a_setting):
        follows = f" {value}" if value and {**_FLAGS, **also}[long_flag] else ""
        why = "takes no value" if flag == long_flag else "there is no such flag"
        return Problem(flag, value or "", why, f"{long_flag}{follows}")
    if flag in _OF_PLAN:
        typed = [*reader.overrides, *reader.tokens]
        fix = shlex.join(["eke", "plan", flag, *(t for t in typed if t != "plan_only=true")])
        return Problem(flag, "", "is a flag of eke plan", fix)
    fix = mend(override, catalogue)
    why = "there is no such flag; settings are typed as key=value, without dashes"
    if not fix:
        flags = ", ".join([*also, "-m", "--config-dir FOLDER", "--cfg job", "--help", "--version"])
        why = f"there is no such flag or setting; flags are {flags}"
    return Problem(flag, value or "", why, fix)


def _near_flag(flag: str, known: Mapping[str, int]) -> str | None:
    """The flag that was misspelt; 0.8 is one or two letters of a long flag."""
    flags = [each for each in known if each.startswith("--")]
    near = difflib.get_close_matches(flag, flags, n=1, cutoff=0.8)
    return near[0] if near else None
