"""Clauses of `sweep.exclude` against the keys there are, and against composed runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from eke.common.errors import Problem
from eke.common.units import format_value
from eke.config.compose.catalogue import Catalogue
from eke.config.compose.composer import Composed
from eke.config.compose.formatting import as_typed, closest
from eke.config.compose.suggest import nearest_key
from eke.config.compose.values import default_text
from eke.config.sweep.expression import (
    ORDERS,
    Comparison,
    Expression,
    ExpressionError,
    read_expression,
)

KEY = "sweep.exclude"
ROW = "row"
"""Stands for the row's name, in a clause."""


@dataclass(frozen=True)
class Clause:
    """One expression of `sweep.exclude`."""

    text: str
    expression: Expression

    def excludes(self, composed: Composed, row: str) -> bool:
        """Whether it is true of a composed run."""
        return self.expression.holds(lambda key: _value_of(composed, row, key))


def read_clauses(
    texts: Sequence[str], catalogue: Catalogue, rows: Sequence[str]
) -> tuple[list[Clause], list[Problem]]:
    """The clauses that can be judged, and what is wrong with the others."""
    clauses, problems = [], []
    for text in texts:
        try:
            expression = read_expression(text)
        except ExpressionError as error:
            why = f"no expression: {error}; as in precision=fp16 and model=tiny_t5"
            problems.append(Problem(KEY, text, why, _unbracketed(text)))
            continue
        wrong = [p for c in expression.comparisons() for p in _check(c, text, catalogue, rows)]
        problems += wrong
        clauses += [] if wrong else [Clause(text, expression)]
    return clauses, problems


def _check(
    comparison: Comparison, text: str, catalogue: Catalogue, rows: Sequence[str]
) -> list[Problem]:
    """A key that is not there, and values that it can never have."""
    key, values = comparison.key, comparison.values
    field = catalogue.keys.get(key)
    if key == ROW or key in catalogue.options:
        if comparison.sign in ORDERS:
            why = f"{key} is no number, and {comparison.sign} compares numbers"
            return [Problem(KEY, text, why, _mended(text, f"{key} {comparison.sign}", f"{key} ="))]
        known = list(rows) if key == ROW else list(catalogue.options[key])
        return [p for v in values for p in _not_among(key, v, known, text)]
    if field is None:
        near = nearest_key(key, catalogue)
        why = f"there is no key {key}" + (f"; did you mean {near}?" if near else "")
        return [Problem(KEY, text, why, _mended(text, key, near) if near else "")]
    if isinstance(field.kind, type) and issubclass(field.kind, Enum):
        members = [*field.kind.__members__, *([None] if field.optional else [])]
        return [p for v in values for p in _not_among(key, v, members, text)]
    numeric = field.kind in (int, float)
    if comparison.sign in ORDERS and not numeric:
        return [Problem(KEY, text, f"{key} is no number, and {comparison.sign} compares numbers")]
    wrong: list[Any] = [v for v in values if numeric and isinstance(v, str | bool)]
    if comparison.sign in ORDERS:
        wrong += [v for v in values if v is None]
    why = f"{key} is {field.words()}, never {{}}"
    fix = f"{key}{comparison.sign}{default_text(field)}"
    return [Problem(KEY, text, why.format(v), _mended(text, text, fix)) for v in wrong]


def _not_among(key: str, value: Any, known: Sequence[str | None], text: str) -> list[Problem]:
    # Words such as on, off and true are read as they are typed; a number's name too.
    word = value if value is None or isinstance(value, str) else format_value(value)
    if word in known:
        return []
    names = [name for name in known if name]
    why = f"{key} is never {word}: {', '.join(names) or 'there are none'}"
    near = closest(str(word), names)
    return [Problem(KEY, text, why, _mended(text, str(word), near) if near else "")]


def _unbracketed(text: str) -> str:
    """Without brackets that do not pair up, if the rest is an expression; else nothing."""
    bare = text.strip("[] ")
    try:
        read_expression(bare)
    except ExpressionError:
        return ""
    return _mended(text, text, bare)


def _mended(text: str, wrong: str, right: str) -> str:
    return as_typed(f'{KEY}=["{text.replace(wrong, right, 1)}"]')


def _value_of(composed: Composed, row: str, key: str) -> Any:
    if key == ROW:
        return row
    if key in composed.choices:
        return composed.choices[key]
    node: Any = composed.config
    for part in key.split("."):
        try:
            node = node[part] if isinstance(node, dict) else getattr(node, part)
        except AttributeError:
            raise KeyError(key) from None
    return node.name if isinstance(node, Enum) else node
