"""Parse, check and evaluate clauses of `sweep.exclude`.

The clauses are boolean expressions over keys and their values.

    precision=fp16 and model=tiny_t5
    not (optimizer in (sgd, lion)) or batch.per_device >= 8

Words: and, or, not, in, parentheses; = (or ==), !=, <, <=, >, >=. Numbers are compared as numbers.
Python's grammar reads a clause, in which names stand for its keys and values; nothing is evaluated.
"""

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

from eke.common.errors import Fix, Problem
from eke.common.text import format_value, override
from eke.config.compose.catalogue import FIXED_FIELDS, Catalogue
from eke.config.compose.composer import Composed
from eke.config.compose.overrides import find_problems

ORDERS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_TOKEN = re.compile(
    r"""(?P<quoted>"[^"]*"|'[^']*')|(?P<sign>[<>!=]=|[<>=(),])|(?P<word>[^\s<>!=(),"']+)"""
)
_SIGNS: dict[type[ast.cmpop], str] = {
    ast.Eq: "=", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
    ast.In: "in", ast.NotIn: "not in",  # codespell:ignore notin
}  # fmt: skip


@dataclass(frozen=True)
class Expression:
    """A comparison of one key with values, or expressions joined by an operator."""

    sign: str
    """One of and, or, not; of a comparison one of = != < <= > >= in."""
    parts: tuple["Expression", ...] = ()
    key: str = ""
    values: tuple[Any, ...] = ()
    """Strings, numbers, booleans or None; several only for `in`."""

    def holds(self, lookup: Callable[[str], Any]) -> bool:
        """Evaluate for a run by its keys' values; a missing key (KeyError) equals nothing."""
        if self.parts:
            answers = (part.holds(lookup) for part in self.parts)
            if self.sign == "not":
                return not next(answers)
            return all(answers) if self.sign == "and" else any(answers)
        try:
            found = lookup(self.key)
        except KeyError:
            return self.sign == "!="
        if self.sign in ORDERS:
            return _is_number(found) and ORDERS[self.sign](found, self.values[0])
        equal = any(_equal(found, value) for value in self.values)
        return not equal if self.sign == "!=" else equal

    def comparisons(self) -> Iterator["Expression"]:
        """All comparisons in the expression."""
        if not self.parts:
            yield self
        for part in self.parts:
            yield from part.comparisons()


def read_expression(text: str) -> Expression:
    """Parse an expression; raises ValueError if it is invalid."""
    values: dict[str, Any] = {}

    def as_python(token: re.Match[str]) -> str:
        if token["word"] == "in" and not text[token.end() :].lstrip().startswith("("):
            raise ValueError(text)
        if token["sign"] or token["word"] in ("and", "or", "not", "in"):
            return "==" if token[0] == "=" else f" {token[0]} "
        name = f"value{len(values)}"
        values[name] = token[0][1:-1] if token["quoted"] else _value(token[0])
        return f" {name} "

    source = " ".join(_TOKEN.sub(as_python, text).split())  # a clause may have several lines
    try:
        return _read(ast.parse(source, mode="eval").body, values)
    except (SyntaxError, KeyError, RecursionError, MemoryError) as error:
        raise ValueError(text) from error


def _read(node: ast.expr, values: Mapping[str, Any]) -> Expression:
    """Convert a node of Python's grammar, in which names stand for `values`."""
    match node:
        case ast.BoolOp(op, parts):
            sign = "and" if isinstance(op, ast.And) else "or"
            return Expression(sign, tuple(_read(part, values) for part in parts))
        case ast.UnaryOp(ast.Not(), part):
            return Expression("not", (_read(part, values),))
        case ast.Compare(left, [op], [right]) if type(op) in _SIGNS:
            sign = _SIGNS[type(op)]
            listed = [right]
            if isinstance(right, ast.Tuple) and sign in ("in", "not in"):
                listed = right.elts
            key, *found = (values[ast.unparse(each)] for each in (left, *listed))
            if found and re.fullmatch(r"[A-Za-z_][\w.]*", str(key)):
                compared = Expression(sign.removeprefix("not "), key=key, values=tuple(found))
                return Expression("not", (compared,)) if sign == "not in" else compared
    raise KeyError(ast.unparse(node))


def _value(word: str) -> Any:
    known = {"true": True, "false": False, "null": None}
    with suppress(ValueError):
        return known[word.lower()] if word.lower() in known else float(word)
    return word


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _equal(found: Any, value: Any) -> bool:
    if _is_number(found) and _is_number(value):
        return bool(float(found) == value)
    if found is None or value is None or isinstance(found, bool) or isinstance(value, bool):
        return found is value
    # A number as text, to compare `1` with the string `1`.
    return str(found) == (f"{value:g}" if _is_number(value) else str(value))


KEY = "sweep.exclude"
ROW = "row"
"""Key of the row's name in a clause."""


def read_clauses(
    texts: Sequence[str], catalogue: Catalogue, rows: Sequence[str]
) -> tuple[dict[str, Expression], list[Problem]]:
    """The valid clauses by their texts, and the problems of the others."""
    clauses: dict[str, Expression] = {}
    problems: list[Problem] = []
    for text in texts:
        try:
            expression = read_expression(text)
        except ValueError:
            why = "is no expression, as precision=fp16 and model=tiny_t5 is"
            problems.append(Problem(KEY, text, why))
            continue
        wrong = [p for c in expression.comparisons() for p in _check(c, text, catalogue, rows)]
        problems += wrong
        if not wrong:
            clauses[text] = expression
    return clauses, problems


def _check(
    comparison: Expression, text: str, catalogue: Catalogue, rows: Sequence[str]
) -> list[Problem]:
    """Problems of a key and its values: those of overrides, since cells are made by these."""
    key, values = comparison.key, comparison.values
    if key == ROW:
        why = f"no row has this name: {', '.join(rows) or 'there are none'}"
        return [Problem(KEY, text, f"{value}: {why}") for value in values if str(value) not in rows]
    field = catalogue.keys.get(key)
    if comparison.sign in ORDERS and (not field or field.kind not in (int, float)):
        return [Problem(KEY, text, f"{key} is no number, and {comparison.sign} compares numbers")]
    if key.rpartition(".")[2] in FIXED_FIELDS:  # compared, and never set
        return []
    texts = [int(v) if isinstance(v, float) and v.is_integer() else v for v in values]
    found = [p for value in texts for p in find_problems(f"{key}={format_value(value)}", catalogue)]
    return [Problem(KEY, text, f"{p.key}={p.value}: {p.why}", _corrected(text, p)) for p in found]


def _corrected(text: str, problem: Problem) -> Fix:
    """The clause with the override that is the fix of a problem."""
    if len(problem.fix.words) != 1:
        return Fix()
    key, _, value = problem.fix.words[0].partition("=")
    clause = text.replace(problem.key, key, 1).replace(problem.value, value, 1)
    return Fix(override(KEY, [clause]))


def value_of(composed: Composed, row: str, key: str) -> Any:
    """Value of a key, option of a group or name of the row, in one run; KeyError if it has none."""
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
