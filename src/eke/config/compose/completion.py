"""What a shell may complete: options, keys, values and flags, from the files and the schema alone.

Nothing is composed: an unfinished or wrong command line still has an answer, in the time it takes
to start Python.
"""

import itertools
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from eke.common.paths import user_path
from eke.config.compose.arguments import INFO_VALUES
from eke.config.compose.catalogue import (
    FIXED_FIELDS,
    GROUPS,
    Catalogue,
    Field,
    class_fields,
    headline,
    make_catalogue,
)
from eke.config.schema import Config
from eke.config.schema.docs import field_docs

FLAGS = {
    "--multirun": "several runs, one per value",
    "--config-dir": "a folder with your own options",
    "--cell": "one run of a sweep, with its overrides",
    "--help": "groups and their options",
    "--cfg": "print the composed configuration",
    "--info": "how it was composed",
    "--version": "eke's version",
}
"""Flags that are offered, and what each is for."""

_FLAG_VALUES = {
    ("--cfg", "-c"): ("job", "hydra", "all"),
    ("--info", "-i"): INFO_VALUES,
}
_CONFIG_DIR = ("--config-dir", "-cd")
# These may choose an option of any group, so that any option's keys may be meant.
_PRESETS = ("recipe", "experiment", "sweep")


@dataclass(frozen=True)
class Candidate:
    """A word that may stand where the cursor is."""

    text: str
    """The whole word; what ends in `=`, `.` or `/` goes on."""
    about: str = ""
    """What it is, for shells that show it."""


def split_line(line: str) -> tuple[list[str], str]:
    """The words before the cursor, and the one that it is in (empty behind a space)."""
    try:
        words = shlex.split(line)
    except ValueError:  # a quote is still open, or a backslash is last
        words = line.replace("'", "").replace('"', "").rstrip("\\").split()
    if not words or (line[-1:].isspace() and line[-2:-1] != "\\"):
        return words, ""
    return words[:-1], words[-1]


def candidates(words: Sequence[str], word: str) -> list[Candidate]:
    """What may stand in the place of `word`.

    Args:
        words: the words before it, without the program.
        word: what is typed of it.
    """
    before = words[-1] if words else ""
    if before in _CONFIG_DIR:
        return list(files("", word, folders=True))
    for flags, values in _FLAG_VALUES.items():
        if before in flags:
            return [Candidate(value) for value in values if value.startswith(word)]
    if word.startswith("-"):
        return [Candidate(f, about) for f, about in FLAGS.items() if f.startswith(word)]
    catalogue = make_catalogue(_config_dir(words))
    key, equals, value = word.partition("=")
    if equals:
        multirun = "-m" in words or "--multirun" in words
        return list(_values(key, value, multirun, catalogue))
    typed = {text.partition("=")[0] for text in words}
    found = _keys(word.rpartition(".")[0], words, catalogue) if "." in word else _starts(catalogue)
    return [c for c in found if c.text.startswith(word) and c.text.removesuffix("=") not in typed]


def _config_dir(words: Sequence[str]) -> Path | None:
    """The folder of the user's own options, if one is named that is there."""
    folder = ""
    for before, word in itertools.pairwise(["", *words]):
        flag, equals, inline = word.partition("=")
        if before in _CONFIG_DIR:
            folder = word
        elif equals and flag in _CONFIG_DIR:
            folder = inline
    path = user_path(folder)
    return path if folder and path.is_dir() else None


def _starts(catalogue: Catalogue) -> Iterator[Candidate]:
    """Groups, sections and keys that belong to none."""
    docs = field_docs(Config)
    for group in catalogue.options:
        yield Candidate(f"{group}=", GROUPS.get(group, ""))
    for section in catalogue.sections:
        if catalogue.names(section):
            yield Candidate(f"{section}.", f"keys of {section}")
    for key in catalogue.keys:
        if "." not in key:
            yield Candidate(f"{key}=", docs.get(key, ""))


def _keys(section: str, words: Sequence[str], catalogue: Catalogue) -> Iterator[Candidate]:
    """The keys of a section, as its chosen option has them."""
    seen = set()
    for cls in _classes(section, words, catalogue):
        docs = field_docs(cls)
        for name, _ in class_fields(cls):
            if name not in FIXED_FIELDS and name not in seen:
                seen.add(name)
                yield Candidate(f"{section}.{name}=", docs.get(name, ""))


def _classes(section: str, words: Sequence[str], catalogue: Catalogue) -> Sequence[type]:
    pairs = dict(word.split("=", 1) for word in words if "=" in word)
    options = catalogue.options.get(section, {})
    preset = any(pairs.get(group, "none") != "none" for group in _PRESETS)
    default = None if preset else catalogue.defaults.get(section)
    chosen = [o for o in pairs.get(section, default or "").split(",") if o in options]
    if not chosen:
        return catalogue.sections.get(section, ())
    return [catalogue.schema_class(section, option) for option in chosen]


def _values(key: str, value: str, multirun: bool, catalogue: Catalogue) -> Iterator[Candidate]:
    """Values of a key or options of a group; with -m, one more behind the comma."""
    fixed = key.rpartition(".")[2] in FIXED_FIELDS
    field = None if fixed else catalogue.keys.get(key)
    if field is not None and field.kind is str:
        yield from files(f"{key}=", value)
        return
    given, _, part = value.rpartition(",") if multirun else ("", "", value)
    start = f"{key}={given}," if given else f"{key}="
    choices = _choices(key, field, catalogue)
    for choice, about in choices.items():
        if choice.startswith(part) and choice not in given.split(","):
            yield Candidate(f"{start}{choice}", about)


def _choices(key: str, field: Field | None, catalogue: Catalogue) -> dict[str, str]:
    if key in catalogue.options:
        files = catalogue.options[key].items()
        return {option: headline(file).partition(" -- ")[2] for option, file in files}
    if field is None:
        return {}
    words: list[str] = []
    if field.kind is bool:
        words = ["true", "false"]
    elif isinstance(field.kind, type) and issubclass(field.kind, Enum):
        words = list(field.kind.__members__)
    # A number has no list; `null` alone would be put there unasked.
    return dict.fromkeys([*words, *(["null"] if words and field.optional else [])], "")


def files(start: str, typed: str, folders: bool = False) -> Iterator[Candidate]:
    """Files and folders whose name begins as typed; hidden ones only when a dot is typed."""
    place, _, name = typed.rpartition("/")
    place += "/" if "/" in typed else ""
    try:
        entries = sorted(os.scandir(os.path.expanduser(place) or "."), key=lambda e: e.name)
    except OSError:  # there is no such folder, or it cannot be read
        return
    for entry in entries:
        hidden = entry.name.startswith(".") and not name.startswith(".")
        if entry.name.startswith(name) and not hidden and (entry.is_dir() or not folders):
            yield Candidate(f"{start}{place}{entry.name}{'/' if entry.is_dir() else ''}")
