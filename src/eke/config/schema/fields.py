"""Limits, classes and descriptions of configuration keys."""

import ast
import functools
import inspect
import itertools
import math
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

from eke.common.errors import Fix, Problem
from eke.common.text import format_value

LARGEST = 2**53
"""Upper limit of all numbers. A float represents every whole number up to this value."""


@dataclass(frozen=True)
class Limit:
    """Interval of finite numbers. A bound of None is open."""

    low: float | None = None
    high: float | None = None
    low_open: bool = False
    high_open: bool = False
    null_is_off: bool = False
    """True if null turns the feature off. It is then suggested for 0 or less."""

    def admits(self, value: float) -> bool:
        """Return whether `value` is finite and inside the interval."""
        if abs(value) > LARGEST or not math.isfinite(value):
            return False
        if self.low is not None and (value <= self.low if self.low_open else value < self.low):
            return False
        if self.high is None:
            return True
        return value < self.high if self.high_open else value <= self.high

    def describe(self, value: float) -> str:
        """Return the valid range as text for the error message about `value`."""
        if isinstance(value, float) and not math.isfinite(value):
            return f"a finite number, {self.describe(0)}"
        low = f"{'above' if self.low_open else 'at least'} {_number(self.low or 0)}"
        if self.high is None:
            return f"at most {_number(LARGEST)}" if value > LARGEST else low
        if not self.low_open and not self.high_open:
            return f"between {_number(self.low or 0)} and {_number(self.high)}"
        return f"{low} and {'below' if self.high_open else 'at most'} {_number(self.high)}"

    def in_place_of(self, value: float, default: object) -> object:
        """Return the value to suggest for a `value` outside the interval."""
        return None if self.null_is_off and value <= 0 else default


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:g}"


def find_limit_problems(node: Any, prefix: str = "") -> Iterator[Problem]:
    """Yield a problem for each value outside its limits. `prefix` is the section's key."""
    for field in fields(node):
        value = getattr(node, field.name)
        path = f"{prefix}{field.name}"
        if is_dataclass(value):
            yield from find_limit_problems(value, f"{path}.")
            continue
        limit = field.metadata.get("limit")
        if isinstance(limit, Limit) and value is not None and not limit.admits(value):
            fix = Fix(f"{path}={format_value(limit.in_place_of(value, field.default))}")
            why = f"must be {limit.describe(value)}"
            yield Problem(path, format_value(value), why, fix, "limit")


def above(
    low: float, at_most: float | None = None, *, null_is_off: bool = False
) -> dict[str, Limit]:
    """Return metadata of a value above `low`, and at most `at_most` if given."""
    return {"limit": Limit(low, at_most, low_open=True, null_is_off=null_is_off)}


def at_least(low: float, *, null_is_off: bool = False) -> dict[str, Limit]:
    """Return metadata of a value of at least `low`."""
    return {"limit": Limit(low=low, null_is_off=null_is_off)}


def between(low: float, high: float) -> dict[str, Limit]:
    """Return metadata of a value in the closed interval."""
    return {"limit": Limit(low=low, high=high)}


def below(low: float, high: float) -> dict[str, Limit]:
    """Return metadata of a value of at least `low` and below `high`."""
    return {"limit": Limit(low=low, high=high, high_open=True)}


class Affects(Enum):
    """Class of a key: the part of a result that the key may change."""

    learning = "learning"
    """Changes the loss but not the time per sample."""
    rounding = "rounding"
    """Changes time and memory but not the mathematics."""
    both = "both"
    budget = "budget"
    """Changes the number of samples."""
    group = "group"
    """Changes the work. Losses and speeds of two values cannot be compared."""
    none = "none"


class Key:
    """Metadata of fields with the class of their key."""

    LEARNING, ROUNDING, BOTH, BUDGET, GROUP, NONE = ({"affects": each} for each in Affects)
    SWITCHED = LEARNING | {"is_off_at_zero": True}
    """Learning between two values above 0. The value 0 also saves time or memory."""


@dataclass
class OptionGroup:
    """Group with options."""

    option: str = "none"
    """Selected option, set by the option file."""

    @property
    def is_on(self) -> bool:
        """Whether another option than none is selected."""
        return self.option != "none"


class AutoBool(Enum):
    """Switch of a feature. auto: the plan decides."""

    auto = "auto"
    on = "on"
    off = "off"


def summary(cls: type) -> str:
    """Return the first paragraph of a class's docstring on one line."""
    return _one_line((inspect.getdoc(cls) or "").partition("\n\n")[0])


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """Return field -> docstring, with inherited fields. Fields without docstring are absent."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if is_dataclass(base):
            docs.update(_own_docs(base))
    return docs


def _own_docs(cls: type) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except OSError:  # an installation without sources has no descriptions
        return {}
    [node] = ast.parse(source).body
    body = node.body if isinstance(node, ast.ClassDef) else []
    return {
        field.target.id: _one_line(text.value.value)
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if isinstance(text.value.value, str)
    }


def _one_line(text: str) -> str:
    return " ".join(text.split())
