"""Which runs a sweep leaves out: a small language over keys and their values.

    precision=fp16 and model=tiny_t5
    not (optimizer in (sgd, lion)) or batch.per_device >= 8

Words: and, or, not, in, parentheses; = (or ==), !=, <, <=, >, >=. Numbers are compared as numbers.
Nothing is evaluated by Python.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Lookup = Callable[[str], Any]
"""The value of a key in one run; raises KeyError where the run has no such key."""

ORDERS = ("<", "<=", ">", ">=")
_TOKEN = re.compile(
    r"""\s*(?:(?P<quoted>"[^"]*"|'[^']*')|(?P<sign>[<>!=]=|[<>=(),])|(?P<word>[^\s<>!=(),"']+))"""
)
_WORDS = ("and", "or", "not", "in")


class ExpressionError(ValueError):
    """The text is not in the language; says why."""


@dataclass(frozen=True)
class Comparison:
    """One key against one value, or several."""

    key: str
    sign: str
    """One of = != < <= > >= in."""
    values: tuple[Any, ...]
    """One but for `in`: texts, numbers, booleans or None."""

    def holds(self, lookup: Lookup) -> bool:
        """Whether it is true of a run; a key that the run has not is unequal to everything."""
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
    """A comparison, or several joined by a word."""

    word: str
    """and, or, not; empty for a single comparison."""
    parts: tuple["Expression", ...] = ()
    comparison: Comparison | None = None

    def holds(self, lookup: Lookup) -> bool:
        """Whether it is true of a run."""
        if self.comparison is not None:
            return self.comparison.holds(lookup)
        answers = (part.holds(lookup) for part in self.parts)
        if self.word == "not":
            return not next(answers)
        return all(answers) if self.word == "and" else any(answers)

    def comparisons(self) -> Iterator[Comparison]:
        """Every comparison in it."""
        if self.comparison is not None:
            yield self.comparison
        for part in self.parts:
            yield from part.comparisons()


def read_expression(text: str) -> Expression:
    """Parse a text.

    Raises:
        ExpressionError: it is not in the language.
    """
    reader = _Reader(_tokens(text))
    expression = reader.either()
    if reader.next:
        raise ExpressionError(f"{reader.next} is one too many")
    return expression


def read_value(text: str) -> Any:
    """A word as a value: a number, true, false, null, else itself."""
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
    """Recursive descent: or, and, not, what stands in parentheses, comparison."""

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
            listed = Expression("", comparison=Comparison(key, "in", self._listed()))
            return Expression("not", (listed,))
        if sign == "in":
            return Expression("", comparison=Comparison(key, "in", self._listed()))
        sign = "=" if sign == "==" else sign
        if sign not in ("=", "!=", *ORDERS):
            raise ExpressionError(f"{sign} stands where = or another comparison belongs")
        return Expression("", comparison=Comparison(key, sign, (self._value(),)))

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
    """A value as it was typed: `1` against a text that is `1`."""
    return f"{value:g}" if _is_number(value) else str(value)
