"""Numeric limits of single keys, read from the schema's field metadata."""

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

from eke.common.errors import Problem
from eke.common.units import format_value
from eke.config.schema import Config, Limit


def find_limit_problems(config: Config) -> list[Problem]:
    """Every value outside its limits; the fix is the key's default, or null."""
    return list(_walk(config, ""))


def with_defaults_for(config: Config, problems: list[Problem]) -> Config:
    """A copy with the default in place of every value that is outside its limits.

    So that the other rules can be asked in the same breath, without stumbling over a width of -1.
    """
    mended = copy.deepcopy(config)
    for problem in problems:
        *groups, key = problem.path.split(".")
        node: Any = mended
        for group in groups:
            node = getattr(node, group)
        default = next(f.default for f in dataclasses.fields(node) if f.name == key)
        setattr(node, key, default)
    return mended


def _walk(node: Any, prefix: str) -> Iterator[Problem]:
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        path = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from _walk(value, f"{path}.")
            continue
        limit = field.metadata.get("limit")
        if isinstance(limit, Limit) and value is not None and not limit.admits(value):
            instead = format_value(limit.in_place_of(value, field.default))
            yield Problem(
                path,
                format_value(value),
                f"must be {limit.describe(value)}",
                f"{path}={instead}",
                "limit",
            )
