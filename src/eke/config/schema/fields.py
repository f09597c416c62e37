"""Limits and descriptions of configuration fields."""

import ast
import functools
import inspect
import itertools
import math
import textwrap
from dataclasses import dataclass, is_dataclass
from enum import Enum

LARGEST = 2**53
"""Above any quantity there is, and the last whole number up to which a float counts every one."""


@dataclass(frozen=True)
class Limit:
    """An interval of finite numbers; a bound that is None is open."""

    low: float | None = None
    high: float | None = None
    low_open: bool = False
    high_open: bool = False
    null_is_off: bool = False
    """Null turns off what a number turns on: 0 was meant so."""

    def admits(self, value: float) -> bool:
        """Whether `value` lies inside; infinity and not-a-number never do."""
        if abs(value) > LARGEST or not math.isfinite(value):
            return False
        if self.low is not None and (value <= self.low if self.low_open else value < self.low):
            return False
        if self.high is None:
            return True
        return value < self.high if self.high_open else value <= self.high

    def describe(self, value: float) -> str:
        """What is wanted instead of `value`, for an error message."""
        if isinstance(value, float) and not math.isfinite(value):
            return f"a finite number, {self.describe(0)}"
        low = f"{'above' if self.low_open else 'at least'} {_number(self.low or 0)}"
        if self.high is None:
            return f"at most {_number(LARGEST)}" if value > LARGEST else low
        if not self.low_open and not self.high_open:
            return f"between {_number(self.low or 0)} and {_number(self.high)}"
        return f"{low} and {'below' if self.high_open else 'at most'} {_number(self.high)}"

    def in_place_of(self, value: float, default: object) -> object:
        """What to type for a `value` that is not admitted."""
        return None if self.null_is_off and value <= 0 else default


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:g}"


def above(
    low: float, at_most: float | None = None, *, null_is_off: bool = False
) -> dict[str, Limit]:
    """The value must be greater than `low`, and `at_most` or less."""
    return {"limit": Limit(low, at_most, low_open=True, null_is_off=null_is_off)}


def at_least(low: float, *, null_is_off: bool = False) -> dict[str, Limit]:
    """The value must be `low` or more."""
    return {"limit": Limit(low=low, null_is_off=null_is_off)}


def between(low: float, high: float) -> dict[str, Limit]:
    """The value must lie in the closed interval."""
    return {"limit": Limit(low=low, high=high)}


def below(low: float, high: float) -> dict[str, Limit]:
    """The value must be `low` or more, and less than `high`."""
    return {"limit": Limit(low=low, high=high, high_open=True)}


class Affects(Enum):
    """Class of a key: the part of a result that another value may change."""

    learning = "learning"
    """The loss, and not the time of a sample."""
    rounding = "rounding"
    """Time and memory, by the same mathematics."""
    both = "both"
    budget = "budget"
    """The number of samples."""
    group = "group"
    """The work: losses and speeds of two values are not comparable."""
    none = "none"


class Key:
    """Metadata of fields: the classes of their keys."""

    LEARNING, ROUNDING, BOTH, BUDGET, GROUP, NONE = ({"affects": each} for each in Affects)
    SWITCHED = LEARNING | {"is_off_at_zero": True}
    """Learning between two values above 0; 0 also saves time or memory."""


@dataclass
class OptionGroup:
    """A group with options."""

    option: str = "none"
    """The option chosen; set by the option's file."""


class Switch(Enum):
    """Leave it to the plan, or force it."""

    auto = "auto"
    on = "on"
    off = "off"


def summary(cls: type) -> str:
    """The first paragraph of a class's docstring, on one line."""
    return _one_line((inspect.getdoc(cls) or "").partition("\n\n")[0])


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """Field -> the text under it, inherited fields included; a field without one is absent."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if is_dataclass(base):
            docs.update(_own_docs(base))
    return docs


def _own_docs(cls: type) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except OSError:  # an installation without sources has the keys, and no texts
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
