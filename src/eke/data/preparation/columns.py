"""From a row's named values to the texts and the label a sample is made of, or why not."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eke.common.did_you_mean import closest
from eke.common.errors import ConfigError, Problem
from eke.data.sources import Request

MAX_NAMES = 10_000
"""More different text labels than this are no classes."""

PROMPTS = ("prompt", "instruction", "question", "query", "input", "source")
ANSWERS = ("completion", "response", "answer", "output", "target", "chosen")
"""Usual names of columns with what is read, and with what is predicted."""


class BadRowError(Exception):
    """A row that cannot be used, with the reason."""


@dataclass(frozen=True)
class Fields:
    """What is used of one row."""

    texts: tuple[str, ...]
    """One text, or prompt and response."""
    label: int = 0
    """Class, or the number of a text label in order of appearance."""


@dataclass
class Columns:
    """The columns a request reads, and the labels seen so far."""

    request: Request
    kind: str = ""
    """number or name, decided by the first row that has a label."""
    names: dict[str, int] = field(default_factory=dict)
    """Text labels by number, in order of appearance."""
    largest: int = 0
    """Largest label that was too large."""
    too_large: int = 0
    """Rows with such a label."""
    seen: Counter[str] = field(default_factory=Counter)
    """Columns of the rows, as far as they were looked at."""
    found: set[str] = field(default_factory=set)
    """Wanted columns that some row had."""
    first_table: str = ""
    """The first file whose head has all wanted columns."""

    @property
    def wanted(self) -> list[tuple[str, str]]:
        """Key path and column, texts first."""
        request = self.request
        pairs = [("text", request.text), ("prompt", request.prompt),
                 ("response", request.response), ("label", request.label)]  # fmt: skip
        return [(f"data.{key}", column) for key, column in pairs if column is not None]

    def take(self, row: Mapping[str, Any]) -> Fields:
        """The texts and the label of a row.

        Raises:
            BadRowError: a column is missing, empty of a value, or of the wrong type.
        """
        if len(self.found) < len(self.wanted):
            self.seen.update(str(name) for name in row)
            self.found.update(column for _, column in self.wanted if column in row)
        texts = [self._text(row, c) for key, c in self.wanted if key != "data.label"]
        label = 0
        if self.request.label is not None:
            label = self._label(_value(row, self.request.label))
        return Fields(tuple(texts), label)

    def _text(self, row: Mapping[str, Any], column: str) -> str:
        value = _value(row, column)
        if not isinstance(value, str):
            raise BadRowError(f"{column} is {_kind(value)}, not text")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise BadRowError(f"{column} is not UTF-8 (character {error.start + 1})") from error
        return value

    def _label(self, value: Any) -> int:
        column = self.request.label
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, str) and self.request.option == "csv" and self.kind != "name":
            digits = value.strip()
            value = int(digits) if digits.removeprefix("-").isdecimal() else value
        if not isinstance(value, int | str) or value == "":
            raise BadRowError(f"{column} is {_kind(value)}, neither a whole number nor a text")
        kind = "name" if isinstance(value, str) else "number"
        self.kind = self.kind or kind
        if kind != self.kind:
            raise BadRowError(
                f"{column} is {_shown(value)}, where rows before it had a {self.kind}"
            )
        return self._name(value) if isinstance(value, str) else self._number(int(value))

    def _number(self, value: int) -> int:
        if not 0 <= value < self.request.num_labels:
            self.largest = max(self.largest, value)
            self.too_large += value > 0
            raise BadRowError(
                f"{self.request.label} is {value}, outside 0 to {self.request.num_labels - 1}"
            )
        return value

    def _name(self, value: str) -> int:
        if len(self.names) >= MAX_NAMES and value not in self.names:
            why = f"has more than {MAX_NAMES} different texts: these are no classes"
            raise ConfigError(
                Problem("data.label", str(self.request.label), why, "data.label=COLUMN")
            )
        return self.names.setdefault(value, len(self.names))

    def require(self) -> None:
        """All wanted columns exist in some row so far.

        Raises:
            ConfigError: some do not, each with the column that was probably meant.
        """
        missing = [(key, column) for key, column in self.wanted if column not in self.found]
        if missing:
            raise ConfigError(
                [self._absent(key, column, list(self.seen)) for key, column in missing]
            )

    def require_in(self, names: list[str], file: str = "") -> None:
        """All wanted columns exist in a table.

        Args:
            names: the table's columns.
            file: where it lies; empty for the hub's.

        Raises:
            ConfigError: some do not, each with the column that was probably meant; or they are in
                the files before this one.
        """
        missing = [(key, column) for key, column in self.wanted if column not in names]
        if not missing:
            self.first_table = self.first_table or file
        elif self.first_table:
            raise ConfigError(self._unlike_the_first(file, missing[0][1], names))
        else:
            raise ConfigError([self._absent(key, column, names) for key, column in missing])

    def _unlike_the_first(self, file: str, column: str, names: list[str]) -> Problem:
        is_evaluation = any(file == path for _, path in self.request.evaluation)
        key = "data.eval_path" if is_evaluation else "data.path"
        why = (
            f"{self.first_table} has a column {_shown(column)}, and this file has none; it has: "
            f"{_listed(names)}"
        )
        fix = "data.eval_path=FILE" if is_evaluation else _override("data.path", self.first_table)
        return Problem(key, file, why, fix)

    def _absent(self, key: str, column: str, there: list[str]) -> Problem:
        pair = self._pair(there) if key == "data.text" else ()
        used = {c for _, c in self.wanted}
        free = [name for name in there if name not in used]
        only = free if len(free) == 1 else []
        near = closest(column, free)
        close = [near] if near else only
        why = f"there is no such column; there are: {_listed(there)}"
        fix = _override(key, close[0]) if close else f"{key}=COLUMN"
        if pair:
            fix = " ".join(map(_override, ("data.prompt", "data.response"), pair))
        return Problem(key, column, why, fix)

    def _pair(self, there: list[str]) -> tuple[str, ...]:
        """The columns of a prompt and its answer, by the names that such columns have."""
        known = {name.lower(): name for name in there}
        pair = [next((known[n] for n in names if n in known), "") for names in (PROMPTS, ANSWERS)]
        return tuple(pair) if all(pair) and self.request.task == "causal_lm" else ()

    def numbered(self) -> tuple[tuple[str, ...], dict[int, int]]:
        """Text labels by class, and the class of each number in order of appearance.

        Where the checkpoint's head knows all of them, or transformers' own `LABEL_0` and the like
        are they, they have these numbers; else those of their sorted order.

        Raises:
            ConfigError: there are more of them than classes.
        """
        plain = tuple(f"LABEL_{number}" for number in range(self.request.num_labels))
        choices = (self.request.head_labels, plain, tuple(sorted(self.names)))
        names = next(names for names in choices if set(self.names) <= set(names))
        if len(names) > self.request.num_labels:
            listed = ", ".join(_shown(name) for name in names[:10])
            why = f"column {self.request.label} has {len(names)} different labels: {listed}"
            fix = f"task.num_labels={len(names)}"
            raise ConfigError(Problem("task.num_labels", str(self.request.num_labels), why, fix))
        known = [(number, name) for number, name in enumerate(names) if name in self.names]
        return names, {self.names[name]: number for number, name in known}


def _value(row: Mapping[str, Any], column: str) -> Any:
    if column not in row:
        raise BadRowError(f"there is no {column}")
    return row[column]


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return f"the number {str(value)[:20]}"
    return "empty" if value == "" else type(value).__name__


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 30 else text[:27] + "..."


def _listed(names: list[str]) -> str:
    return ", ".join(map(_shown, names[:10])) or "none"


def _override(key: str, value: str) -> str:
    """As it has to be typed, whatever the value holds."""
    from eke.config.compose.formatting import as_typed
    from eke.config.sweep.text import value_text  # Hydra, for a mistake alone

    return as_typed(f"{key}={value_text(value)}")
