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
    is_interpolation,
    probably_meant,
    shown,
)
from eke.config.compose.suggest import option_for
from eke.config.mixing import SHARED, fix_source, source_names
from eke.config.schema import MIXED, Data, HubRows, Mix

EXAMPLE = Fix(remark="data.sources=[{option:jsonl,path:FILE_OR_FOLDER,weight:1},...]")


def find_source_problems(data: Data) -> list[Problem]:
    """Everything that is wrong in the sources of a mix; nothing is wrong in other data."""
    if not isinstance(data, Mix):
        return []
    if not data.sources:
        return [Problem("data.sources", "[]", "a mix has at least one source", EXAMPLE)]
    found = [p for number in range(len(data.sources)) for p in _source(data, number)]
    return found or [*_weights(data), *_names(data)]


def _source(mix: Mix, number: int) -> Iterator[Problem]:
    source, place = mix.sources[number], f"data.sources[{number}]"
    option = source.get("option")
    if option not in MIXED:
        ending = option_for(str(source.get("path", "")))
        meant = closest(str(option), MIXED) or (ending if ending in MIXED else "jsonl")
        why = f"a source of a mix is one of {', '.join(MIXED)}"
        fix = fix_source(mix, number, {"option": meant})
        yield Problem(f"{place}.option", shown(format_value(option)), why, fix)
        return
    names = dict(class_fields(MIXED[option]))
    extra = {"weight": Field(float | None, None), "name": Field(str | None, None)}
    known = {**extra, **{name: each for name, each in names.items() if name != "option"}}
    for key, value in source.items():
        if key != "option" and (found := _key(mix, number, key, value, known)):
            yield found
    for name, each in names.items():
        if each.default == "???" and name not in source:
            fix = fix_source(mix, number, {name: default_text(each, f"data.{name}")})
            yield Problem(f"{place}.{name}", "", f"{option} needs a value for it", fix)


def _key(mix: Mix, number: int, key: str, value: Any, known: dict[str, Field]) -> Problem | None:
    place, text = f"data.sources[{number}].{key}", shown(format_value(value))
    if key in SHARED:
        why = "all sources of a mix share it: it is a key of the mix"
        fix = fix_source(mix, number, {key: None}, f"data.{key}={format_value(value)}")
        return Problem(place, text, why, fix)
    if key not in known:
        near = closest(key, known)
        why = f"there is no such key of {mix.sources[number]['option']}: {', '.join(known)}"
        changes = {key: None} | ({near: format_value(value)} if near else {})
        return Problem(place, text, why, fix_source(mix, number, changes))
    field = known[key]
    is_text = isinstance(value, str) and field.kind in (bool, int, float)
    if key == "weight" and value is not None:
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e9:
            return None
        why = "a weight is above 0, and relative to those of the other sources"
        return Problem(place, text, why, fix_source(mix, number, {key: "1"}))
    if is_interpolation(value) or (admits(field, value) and not is_text):
        return None
    fix = fix_source(mix, number, {key: probably_meant(field, value)})
    return Problem(place, text, f"{field.words()} is wanted", fix)


def _weights(mix: Mix) -> Iterator[Problem]:
    """Either all sources have a weight, or none."""
    weights = [source.get("weight") for source in mix.sources]
    given = [weight for weight in weights if weight is not None]
    for number, weight in enumerate(weights):
        if given and weight is None:
            why = f"{len(given)} of {len(weights)} sources have a weight: it takes all or none"
            fix = fix_source(mix, number, {"weight": format_value(min(given))})
            yield Problem(f"data.sources[{number}].weight", "null", why, fix)
            return  # the fix of another would undo this one


def _names(mix: Mix) -> Iterator[Problem]:
    names = source_names(mix)
    for number, name in enumerate(names):
        if name in names[:number]:
            first = names.index(name)
            why = f"is the name of data.sources[{first}] too, and losses are given by name"
            fix = fix_source(mix, number, {"name": f"{name}_{number}"})
            if issubclass(MIXED[mix.sources[number]["option"]], HubRows):
                fix = Fix(remark="each data set, configuration and split once")
            yield Problem(f"data.sources[{number}].name", name, why, fix)
