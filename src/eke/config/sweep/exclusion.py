"""Parse, check and evaluate clauses of `sweep.exclude`.

The clauses are boolean expressions over keys and their values.

    precision=fp16 and model=tiny_t5
    not (optimizer in (sgd, lion)) or batch.per_device >= 8

Words: and, or, not, in, parentheses; = (or ==), !=, <, <=, >, >=. Numbers are compared as numbers.
Python evaluates no part of a clause.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from eke.common.errors import Fix, Problem
from eke.common.text import format_value
from eke.config.compose.catalogue import Catalogue, closest, default_text
from eke.config.compose.composer import Composed
from eke.config.compose.suggest import nearest_key

Lookup = Callable[[str], Any]
"""The value of a key in one run; raises KeyError if the run lacks the key."""

ORDERS = ("<", "<=", ">", ">=")
_TOKEN = re.compile(
    r"""\s*(?:(?P<quoted>"[^"]*"|'[^']*')|(?P<sign>[<>!=]=|[<>=(),])|(?P<word>[^\s<>!=(),"']+))"""
)
_WORDS = ("and", "or", "not", "in")


class ExpressionError(ValueError):
    """Invalid expression, with the reason."""


@dataclass(frozen=True)
class KeyComparison:
    """Comparison of one key with one or several values."""

    key: str
    sign: str
    """One of = != < <= > >= in."""
    values: tuple[Any, ...]
    """Strings, numbers, booleans or None; several only for `in`."""

    def holds(self, lookup: Lookup) -> bool:
        """Evaluate the comparison for a run; a missing key is unequal to everything."""
        try:
            found = lookup(self.key)
        except KeyError:
            return self.sign == "!="
        if self.sign in ORDERS:
            return _is_number(found) and _ordered(found, self.sign, self.values[0])
        equal = any(_equal(found, value) for value in self.values)
        return not equal if self.sign == "!=" else equal


@dataclass(frozen=True)
class Expression:
    """A comparison, or expressions joined by an operator."""

    word: str
    """Operator (and, or, not); empty for a single comparison."""
    parts: tuple["Expression", ...] = ()
    comparison: KeyComparison | None = None

    def holds(self, lookup: Lookup) -> bool:
        """Evaluate the expression for a run."""
        if self.comparison is not None:
            return self.comparison.holds(lookup)
        answers = (part.holds(lookup) for part in self.parts)
        if self.word == "not":
            return not next(answers)
        return all(answers) if self.word == "and" else any(answers)

    def comparisons(self) -> Iterator[KeyComparison]:
        """All comparisons in the expression."""
        if self.comparison is not None:
            yield self.comparison
        for part in self.parts:
            yield from part.comparisons()


def read_expression(text: str) -> Expression:
    """Parse an expression.

    Raises:
        ExpressionError: the text is invalid.
    """
    reader = _Reader(_tokens(text))
    expression = reader.either()
    if reader.next:
        raise ExpressionError(f"{reader.next} is one too many")
    return expression


def read_value(text: str) -> Any:
    """Convert a word to a number, boolean or None; otherwise return it unchanged."""
    if text[:1] in ("'", '"'):
        return text[1:-1]
    known = {"true": True, "false": False, "null": None}
    if text.lower() in known:
        return known[text.lower()]
    try:
        return float(text)
    except ValueError:
        return text


def _tokens(text: str) -> list[str]:
    tokens, at = [], 0
    while text[at:].strip():
        match = _TOKEN.match(text, at)
        if not match:
            raise ExpressionError(f"{text[at:].strip()[:1]} has no meaning here")
        tokens.append(match[0].strip())
        at = match.end()
    return tokens


class _Reader:
    """Recursive descent parser: or, and, not, parentheses, comparison."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        if not tokens:
            raise ExpressionError("it is empty")

    @property
    def next(self) -> str:
        return self._tokens[0] if self._tokens else ""

    def take(self, wanted: str = "") -> str:
        if not self._tokens:
            raise ExpressionError(f"it ends where {wanted or 'something'} is missing")
        return self._tokens.pop(0)

    def either(self) -> Expression:
        return self._joined("or", self._both)

    def _both(self) -> Expression:
        return self._joined("and", self._negated)

    def _joined(self, word: str, part: Callable[[], Expression]) -> Expression:
        parts = [part()]
        while self.next == word:
            self.take()
            parts.append(part())
        return parts[0] if len(parts) == 1 else Expression(word, tuple(parts))

    def _negated(self) -> Expression:
        if self.next == "not":
            self.take()
            return Expression("not", (self._negated(),))
        if self.next == "(":
            self.take()
            inside = self.either()
            self._close()
            return inside
        return self._compared()

    def _compared(self) -> Expression:
        key = self.take("a key")
        if not re.fullmatch(r"[A-Za-z_][\w.]*", key) or key in _WORDS:
            raise ExpressionError(f"{key} stands where a key belongs")
        sign = self.take("= or another comparison")
        if sign == "not" and self.next == "in":
            self.take()
            listed = Expression("", comparison=KeyComparison(key, "in", self._listed()))
            return Expression("not", (listed,))
        if sign == "in":
            return Expression("", comparison=KeyComparison(key, "in", self._listed()))
        sign = "=" if sign == "==" else sign
        if sign not in ("=", "!=", *ORDERS):
            raise ExpressionError(f"{sign} stands where = or another comparison belongs")
        return Expression("", comparison=KeyComparison(key, sign, (self._value(),)))

    def _listed(self) -> tuple[Any, ...]:
        if self.take("(") != "(":
            raise ExpressionError("in wants its values in parentheses")
        values = [self._value()]
        while self.next == ",":
            self.take()
            values.append(self._value())
        self._close()
        return tuple(values)

    def _value(self) -> Any:
        text = self.take("a value")
        if text in ("(", ")", ",", *ORDERS, "=", "==", "!=") or text in _WORDS:
            raise ExpressionError(f"{text} stands where a value belongs")
        return read_value(text)

    def _close(self) -> None:
        if self.take(")") != ")":
            raise ExpressionError("a parenthesis is not closed")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _ordered(found: float, sign: str, value: float) -> bool:
    orders = {"<": found < value, "<=": found <= value, ">": found > value, ">=": found >= value}
    return orders[sign]


def _equal(found: Any, value: Any) -> bool:
    if _is_number(found) and _is_number(value):
        return bool(float(found) == value)
    if found is None or value is None or isinstance(found, bool) or isinstance(value, bool):
        return found is value
    return str(found) == _text(value)


def _text(value: Any) -> str:
    """A value as text, to compare `1` with the string `1`."""
    return f"{value:g}" if _is_number(value) else str(value)


KEY = "sweep.exclude"
ROW = "row"
"""Key of the row's name in a clause."""


@dataclass(frozen=True)
class Clause:
    """One expression of `sweep.exclude`."""

    text: str
    expression: Expression

    def excludes(self, composed: Composed, row: str) -> bool:
        """Evaluate the clause for a composed run."""
        return self.expression.holds(lambda key: _value_of(composed, row, key))


def read_clauses(
    texts: Sequence[str], catalogue: Catalogue, rows: Sequence[str]
) -> tuple[list[Clause], list[Problem]]:
    """The valid clauses, and the problems of the others."""
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
    comparison: KeyComparison, text: str, catalogue: Catalogue, rows: Sequence[str]
) -> list[Problem]:
    """Problems of an unknown key, and of values that a key cannot have."""
    key, values = comparison.key, comparison.values
    field = catalogue.keys.get(key)
    if key == ROW or key in catalogue.options:
        if comparison.sign in ORDERS:
            why = f"{key} is no number, and {comparison.sign} compares numbers"
            return [
                Problem(KEY, text, why, _corrected(text, f"{key} {comparison.sign}", f"{key} ="))
            ]
        known = list(rows) if key == ROW else list(catalogue.options[key])
        return [p for v in values for p in _not_among(key, v, known, text)]
    if field is None:
        near = nearest_key(key, catalogue)
        why = f"there is no key {key}" + (f"; did you mean {near}?" if near else "")
        return [Problem(KEY, text, why, _corrected(text, key, near) if near else Fix())]
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
    return [Problem(KEY, text, why.format(v), _corrected(text, text, fix)) for v in wrong]


def _not_among(key: str, value: Any, known: Sequence[str | None], text: str) -> list[Problem]:
    # Words such as on, off and true are compared as text; so are names that look like numbers.
    word = value if value is None or isinstance(value, str) else format_value(value)
    if word in known:
        return []
    names = [name for name in known if name]
    why = f"{key} is never {word}: {', '.join(names) or 'there are none'}"
    near = closest(str(word), names)
    return [Problem(KEY, text, why, _corrected(text, str(word), near) if near else Fix())]


def _unbracketed(text: str) -> Fix:
    """The text without unmatched brackets, if the rest is an expression; else empty."""
    bare = text.strip("[] ")
    try:
        read_expression(bare)
    except ExpressionError:
        return Fix()
    return _corrected(text, text, bare)


def _corrected(text: str, wrong: str, right: str) -> Fix:
    return Fix(f'{KEY}=["{text.replace(wrong, right, 1)}"]')


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
