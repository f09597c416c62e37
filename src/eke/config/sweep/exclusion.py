"""Parse, check and evaluate clauses of `sweep.exclude`.

The clauses are boolean expressions over keys and their values.

    precision=fp16 and model=tiny_t5
    not (optimizer in (sgd, lion)) or batch.per_device >= 8

Words: and, or, not, in, parentheses, = (or ==), !=, <, <=, >, >=. Numbers are compared as numbers.
Python's parser reads a clause, in which names stand for keys and values. No code is evaluated.
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
from eke.config.compose.check_overrides import find_problems
from eke.config.compose.composer import Composed

_ORDERS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_TOKEN = re.compile(
    r"""(?P<quoted>"[^"]*"|'[^']*')|(?P<sign>[<>!=]=|[<>=(),])|(?P<word>[^\s<>!=(),"']+)"""
)
_SIGNS: dict[type[ast.cmpop], str] = {
    ast.Eq: "=", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
    ast.In: "in", ast.NotIn: "not in",  # codespell:ignore notin
}  # fmt: skip


@dataclass(frozen=True)
class Expression:
    """Comparison of one key with values, or expressions joined by an operator."""

    sign: str
    """Operator: and, or, not, or for a comparison = != < <= > >= in."""
    parts: tuple["Expression", ...] = ()
    key: str = ""
    values: tuple[Any, ...] = ()
    """Strings, numbers, booleans or None. Several only for `in`."""

    def holds(self, lookup: Callable[[str], Any]) -> bool:
        """Return whether it holds for a run. Missing keys (KeyError) differ from all values."""
        if self.parts:
            answers = (part.holds(lookup) for part in self.parts)
            if self.sign == "not":
                return not next(answers)
            return all(answers) if self.sign == "and" else any(answers)
        try:
            found = lookup(self.key)
        except KeyError:
            return self.sign == "!="
        if self.sign in _ORDERS:
            return _is_number(found) and _ORDERS[self.sign](found, self.values[0])
        equal = any(_equal(found, value) for value in self.values)
        return not equal if self.sign == "!=" else equal

    def comparisons(self) -> Iterator["Expression"]:
        """Yield all comparisons of the expression."""
        if not self.parts:
            yield self
        for part in self.parts:
            yield from part.comparisons()


def read_expression(text: str) -> Expression:
    """Parse an expression. ValueError if it is invalid."""
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
    # Compare a number as text: `1` equals the string `1`.
    return str(found) == (f"{value:g}" if _is_number(value) else str(value))


CLAUSE_KEY = "sweep.exclude"
_ROW = "row"
_CLAUSE = "wrong_clause"


def read_clauses(
    texts: Sequence[str], catalogue: Catalogue, rows: Sequence[str]
) -> tuple[dict[str, Expression], list[Problem]]:
    """Return text -> expression of valid clauses, and the problems of the others."""
    clauses: dict[str, Expression] = {}
    problems: list[Problem] = []
    for text in texts:
        try:
            expression = read_expression(text)
        except ValueError:
            why = "invalid expression. Example: precision=fp16 and model=tiny_t5"
            problems.append(Problem(CLAUSE_KEY, text, why, id=_CLAUSE))
            continue
        wrong = [p for c in expression.comparisons() for p in _check(c, text, catalogue, rows)]
        problems += wrong
        if not wrong:
            clauses[text] = expression
    return clauses, problems


def _check(
    comparison: Expression, text: str, catalogue: Catalogue, rows: Sequence[str]
) -> list[Problem]:
    key, values = comparison.key, comparison.values
    if key == _ROW:
        named = f"unknown row. Rows: {', '.join(rows) or 'none'}"
        wrong = [value for value in values if str(value) not in rows]
        return [Problem(CLAUSE_KEY, text, f"{value}: {named}", id=_CLAUSE) for value in wrong]
    field = catalogue.keys.get(key)
    if comparison.sign in _ORDERS and (not field or field.kind not in (int, float)):
        why = f"{key} is not a number, which {comparison.sign} needs"
        return [Problem(CLAUSE_KEY, text, why, id=_CLAUSE)]
    if key.rpartition(".")[2] in FIXED_FIELDS:  # may be compared, but not set
        return []
    texts = [int(v) if isinstance(v, float) and v.is_integer() else v for v in values]
    found = [p for value in texts for p in find_problems(f"{key}={format_value(value)}", catalogue)]
    wrongs = [(f"{p.key}={p.value}: {p.why}", _corrected(text, p)) for p in found]
    return [Problem(CLAUSE_KEY, text, why, fix, _CLAUSE) for why, fix in wrongs]


def _corrected(text: str, problem: Problem) -> Fix:
    if len(problem.fix.words) != 1:
        return Fix()
    key, _, value = problem.fix.words[0].partition("=")
    clause = text.replace(problem.key, key, 1).replace(problem.value, value, 1)
    return Fix(override(CLAUSE_KEY, [clause]))


def value_of(composed: Composed, row: str, key: str) -> Any:
    """Return a key's value, a group's option or the row's name in a run. KeyError if missing."""
    if key == _ROW:
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
