"""Checks of `data.sources`: each source against the schema of its option."""

from collections.abc import Iterator
from typing import Any

from eke.common.errors import Fix, Problem
from eke.common.text import format_value
from eke.config.compose.catalogue import (
    Field,
    admits,
    class_fields,
    closest,
    default_text,
    probably_meant,
    shown,
)
from eke.config.compose.suggest import option_for
from eke.config.mixing import SHARED, in_source, source_names
from eke.config.schema import MIXED, Data, Mix

EXAMPLE = Fix(remark="data.sources=[{option:jsonl,path:FILE_OR_FOLDER,weight:1},...]")
EXTRA = {"weight": Field(float | None, None), "name": Field(str | None, None)}
"""Keys of a source that its option need not have."""


def find_source_problems(data: Data) -> list[Problem]:
    """Everything that is wrong in the sources of a mix; nothing is wrong in other data."""
    if not isinstance(data, Mix):
        return []
    if not data.sources:
        return [Problem("data.sources", "[]", "a mix has at least one source", EXAMPLE)]
    numbered = list(enumerate(data.sources))
    found = [in_source(problem, n) for n, source in numbered for problem in _source(source)]
    return found or [in_source(problem, n) for n, problem in _together(data)]


def _source(source: dict[str, Any]) -> Iterator[Problem]:
    option = source.get("option")
    if option not in MIXED:
        ending = option_for(str(source.get("path", "")))
        meant = closest(str(option), MIXED) or (ending if ending in MIXED else "jsonl")
        why = f"a source of a mix is one of {', '.join(MIXED)}"
        fix = Fix(f"data.option={meant}")
        yield Problem("data.option", shown(format_value(option)), why, fix)
        return
    fields = dict(class_fields(MIXED[option]))
    for name, field in fields.items():
        if field.default == "???" and name not in source:
            fix = Fix(f"data.{name}={default_text(field, f'data.{name}')}")
            yield Problem(f"data.{name}", "", f"{option} needs a value for it", fix)
    for key in source:
        if key != "option" and (found := _key(source, key, EXTRA | fields)):
            yield found


def _key(source: dict[str, Any], key: str, known: dict[str, Field]) -> Problem | None:
    value, place = source[key], f"data.{key}"
    text = format_value(value)
    if key in SHARED or key not in known:
        near = closest(key, known)
        fix = Fix(remark=f"write {near} in its place" if near else "remove it from the source")
        why = f"{source['option']} has no such key: {', '.join(known)}"
        if key in SHARED:
            fix = Fix(remark=f"{place}={text} for all, and not in the source")
            why = "is a key of the whole mix"
            place = f"data.{key} of a source"
        return Problem(place, shown(text), why, fix)
    field = known[key]
    if not admits(field, value) or (isinstance(value, str) and field.kind in (bool, int, float)):
        fix = Fix(f"{place}={probably_meant(field, value)}")
        return Problem(place, shown(text), f"{field.words()} is wanted", fix)
    if key == "weight" and value is not None and not 0 < value < float("inf"):
        why = "a weight is above 0; it is relative to the weights of the other sources"
        return Problem(place, text, why, Fix(f"{place}=1"))
    return None


def _together(mix: Mix) -> Iterator[tuple[int, Problem]]:
    """Weights of some sources alone, and names that two have."""
    weights, names = [source.get("weight") for source in mix.sources], source_names(mix)
    given = [weight for weight in weights if weight is not None]
    for number, (weight, name) in enumerate(zip(weights, names, strict=True)):
        if given and weight is None:
            why = f"{len(given)} of {len(weights)} sources have a weight: all have one, or none"
            fix = Fix(f"data.weight={format_value(min(given))}")
            yield number, Problem("data.weight", "null", why, fix)
        if name in names[:number]:
            why = f"is the name of data.sources[{names.index(name)}] too; losses are told by it"
            hub = "name" in dict(class_fields(MIXED[mix.sources[number]["option"]]))
            fix = Fix(remark="each split once") if hub else Fix(f"data.name={name}_{number}")
            yield number, Problem("data.name", name, why, fix)
