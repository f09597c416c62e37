"""Complete words for bash, zsh and fish, without composition: lines may be invalid."""

import glob
import itertools
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path, PurePath

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.paths import user_path
from eke.common.screen import COLOR_CHOICES
from eke.config.compose.catalogue import (
    FIXED_FIELDS,
    Catalogue,
    class_fields,
    make_catalogue,
    suggest_match,
)
from eke.config.compose.command_line import CONFIG_DIR, FLAG_VALUES, HELP, LONG
from eke.config.compose.compose_cache import PRESETS
from eke.config.compose.suggest import typable_keys

_SHARED_FLAGS = ("--help", "--quiet", "--verbose", "--json", "--color", "-q", "-v")
_FLAGS = (*_SHARED_FLAGS, "--multirun", "--config-dir", "--cell", "--cfg", "--info", "--version")


def split_line(line: str) -> tuple[list[str], str]:
    """Split a line into the words before the cursor and the current one ("" after a space)."""
    try:
        words = shlex.split(line)
    except ValueError:  # an open quote, or a trailing backslash
        words = line.replace("'", "").replace('"', "").rstrip("\\").split()
    if not words or (line[-1:].isspace() and line[-2:-1] != "\\"):
        return words, ""
    return words[:-1], words[-1]


def candidates(words: Sequence[str], word: str) -> list[str]:
    """Return completions of a word. A completion that ends in `=`, `.` or `/` can continue."""
    before = words[-1] if words else ""
    if before in CONFIG_DIR:
        return list(_files("", word, folders=True))
    values = {**FLAG_VALUES, "--color": COLOR_CHOICES}.get(LONG.get(before, before))
    if values or word.startswith("-"):
        return [each for each in values or _FLAGS if each.startswith(word)]
    catalogue = make_catalogue(_config_dir(words))
    if before in HELP:
        return _topics(word, catalogue)
    key, equals, value = word.partition("=")
    if equals:
        multirun = "-m" in words or "--multirun" in words
        return list(_values(key, value, multirun, catalogue))
    typed = {text.partition("=")[0] for text in words}
    single = [key for key in catalogue.keys if "." not in key]
    sections = [f"{section}." for section in catalogue.sections if catalogue.names(section)]
    found = [f"{group}=" for group in catalogue.options] + sections + [f"{k}=" for k in single]
    if "." in word:
        found = _keys(word.rpartition(".")[0], words, catalogue)
    return [each for each in found if each.startswith(word) and each.removesuffix("=") not in typed]


def _topics(word: str, catalogue: Catalogue, keys: bool = False) -> list[str]:
    """Return topics of `--help`, or with `keys` of `eke show`."""
    group, equals, _ = word.partition("=")
    if equals:
        options = [*catalogue.options.get(group, ()), *([] if keys else ["all"])]
        return [t for each in options if (t := f"{group}={each}").startswith(word)]
    found = list(dict.fromkeys([*catalogue.options, *catalogue.sections]))
    if keys:
        found += [key for key in typable_keys(catalogue) if "." in word or "." not in key]
    else:
        found.append("all")
    return [topic for topic in found if topic.startswith(word)]


def _config_dir(words: Sequence[str]) -> Path | None:
    folder = ""
    for before, word in itertools.pairwise(["", *words]):
        flag, equals, inline = word.partition("=")
        if before in CONFIG_DIR:
            folder = word
        elif equals and flag in CONFIG_DIR:
            folder = inline
    path = user_path(folder)
    return path if folder and path.is_dir() else None


def _keys(section: str, words: Sequence[str], catalogue: Catalogue) -> list[str]:
    """Return the keys of a section for its chosen option."""
    pairs = dict(word.split("=", 1) for word in words if "=" in word)
    options = catalogue.options.get(section, {})
    # A preset may choose an option of any group, so the keys of all options are possible.
    preset = any(pairs.get(group, "none") != "none" for group in PRESETS)
    default = None if preset else catalogue.defaults.get(section)
    chosen = [o for o in pairs.get(section, default or "").split(",") if o in options]
    classes = [catalogue.schema_class(section, option) for option in chosen]
    names = [
        n for cls in classes or catalogue.sections.get(section, ()) for n, _ in class_fields(cls)
    ]
    return [f"{section}.{name}=" for name in dict.fromkeys(names) if name not in FIXED_FIELDS]


def _values(key: str, value: str, multirun: bool, catalogue: Catalogue) -> Iterator[str]:
    """Yield the values of a key or options of a group, with -m also after a comma."""
    field = None if key.rpartition(".")[2] in FIXED_FIELDS else catalogue.keys.get(key)
    if field is not None and field.kind is str:
        yield from _files(f"{key}=", value)
        return
    # Numbers have no candidates: a shell would insert a single `null` immediately.
    choices = list(catalogue.options.get(key, ()))
    if field and field.kind is bool:
        choices = ["true", "false"]
    elif field and isinstance(field.kind, type) and issubclass(field.kind, Enum):
        choices = list(field.kind.__members__)
    if choices and field and field.optional:
        choices.append("null")
    given, _, part = value.rpartition(",") if multirun else ("", "", value)
    start = f"{key}={given}," if given else f"{key}="
    for choice in choices:
        if choice.startswith(part) and choice not in given.split(","):
            yield f"{start}{choice}"


def _files(start: str, typed: str, folders: bool = False) -> Iterator[str]:
    """Yield files and folders with a prefix, hidden ones only if it starts with a dot."""
    name = os.path.basename(typed)
    place = typed.removesuffix(name)
    for path in sorted(glob.glob(f"{glob.escape(os.path.expanduser(place) + name)}*")):
        is_folder = os.path.isdir(path)
        if is_folder or not folders:
            yield f"{start}{place}{os.path.basename(path)}{'/' if is_folder else ''}"


COMPLETION_FLAGS = ("--shell-completion", "-sc")
"""Hydra's completion flags, which eke handles."""

_SHELLS = ("bash", "zsh", "fish")


def answer_shell(request: Sequence[str], commands: Sequence[str] = ()) -> str:
    """Return the output of `-sc install|query=SHELL`. A query is about COMP_LINE."""
    action, _, shell = (request[0] if request else "").partition("=")
    if len(request) != 1 or action not in ("install", "query"):
        why, fix = "must be install=SHELL or query=SHELL", Fix(remark="-sc install=bash")
        raise ConfigError(Problem("-sc", " ".join(request), why, fix, "wrong_argument"))
    if shell not in _SHELLS:
        fix = Fix(remark=f"-sc {action}={suggest_match(shell, _SHELLS) or 'bash'}")
        why = f"supported shells: {', '.join(_SHELLS)}"
        raise ConfigError(Problem("-sc", request[0], why, fix, "wrong_argument"))
    if action == "install":
        return Path(__file__).with_suffix(f".{shell}").read_text()
    words, word = split_line(os.environ.get("COMP_LINE", ""))
    named = [PurePath(w).name == "eke" or w.endswith(".py") for w in words[:3]]
    typed = words[named.index(True) + 1 if True in named else 1 :]
    if commands and not typed:
        found = [command for command in commands if command.startswith(word)]
    elif commands and typed[0] == "show" and not word.startswith(("-", "/")):
        topics = _topics(word, make_catalogue(_config_dir(typed)), keys=True)
        found = topics or list(_files("", word))
    elif commands and typed[0] not in ("train", "plan", "data", "fit"):
        is_flag = word.startswith("-") or typed[-1] == "--color"
        found = candidates(typed[1:], word) if is_flag else list(_files("", word))
        if word.startswith("-"):
            found = [flag for flag in found if flag in _SHARED_FLAGS]
    else:
        found = candidates(typed[1:] if commands else typed, word)
    # bash replaces only the text after the last word break.
    breaks = os.environ.get("COMP_WORDBREAKS", "")
    kept = re.match(rf".*[{re.escape(breaks)}]", word) if shell == "bash" and breaks else None
    return "".join(f"{each[len(kept[0]) if kept else 0 :]}\n" for each in found)
