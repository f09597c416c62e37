"""The values of a sweep as they are typed: lists, ranges, globs, and these within lists."""

import random
from collections.abc import Iterator
from typing import Any

from hydra.core.override_parser.types import (
    ChoiceSweep,
    Glob,
    IntervalSweep,
    Override,
    RangeSweep,
    Transformer,
)

from eke.compose.catalogue import Catalogue


def sweep_values(parsed: Override, catalogue: Catalogue) -> Iterator[str]:
    """The values of a sweep as text, those of lists within lists included.

    Hydra's own iterator takes a range, a choice or a glob that stands among other values for one
    value. What is shuffled has the same order each time it is typed, so that the sweep is the same
    one. An interval has no values until an optimizer asks for them.
    """
    return _flat(parsed.value(), parsed, catalogue)


def _flat(value: Any, parsed: Override, catalogue: Catalogue) -> Iterator[str]:
    if isinstance(value, IntervalSweep):
        return
    if isinstance(value, Glob):
        yield from value.filter(list(catalogue.options.get(parsed.key_or_group, {})))
        return
    if not isinstance(value, ChoiceSweep | RangeSweep):
        yield Transformer.str(value)
        return
    items: Any = value.list if isinstance(value, ChoiceSweep) else value.range()
    if value.shuffle:
        items = list(items)
        random.Random(parsed.input_line).shuffle(items)
    for item in items:
        yield from _flat(item, parsed, catalogue)


def sweep_parts(value: Any) -> Iterator[Any]:
    """What a sweep is made of: single values, ranges, globs, intervals."""
    if not isinstance(value, ChoiceSweep):
        yield value
        return
    for item in value.list:
        yield from sweep_parts(item)
