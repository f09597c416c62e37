"""The values of a sweep as they are typed: lists, ranges, globs, and these within lists."""

import random
from collections.abc import Iterable, Iterator
from typing import Any

from hydra.core.override_parser.types import (
    ChoiceSweep,
    Glob,
    IntervalSweep,
    Override,
    RangeSweep,
    Transformer,
)

from eke.config.compose.catalogue import Catalogue


def sweep_values(parsed: Override, catalogue: Catalogue) -> Iterator[str]:
    """The values of a sweep as text, those of lists within lists included.

    Hydra's own iterator takes a range, a choice or a glob among other values for one value. An
    interval has no values until an optimizer asks for them.
    """
    for part in sweep_parts(parsed.value()):
        if isinstance(part, Glob):
            yield from part.filter(list(catalogue.options.get(parsed.key_or_group, {})))
        elif isinstance(part, RangeSweep):
            yield from map(Transformer.str, _in_order(part.range(), part.shuffle))
        elif not isinstance(part, IntervalSweep):
            yield Transformer.str(part)


def sweep_parts(value: Any) -> Iterator[Any]:
    """What a sweep is made of: single values, ranges, globs, intervals."""
    if not isinstance(value, ChoiceSweep):
        yield value
        return
    for item in _in_order(value.list, value.shuffle):
        yield from sweep_parts(item)


def _in_order(items: Iterable[Any], shuffled: bool) -> Iterable[Any]:
    """What is shuffled has the same order each time, so that the sweep is the same one."""
    found = list(items) if shuffled else []
    random.Random(0).shuffle(found)
    return found or items
