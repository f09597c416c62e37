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
from eke.config.mixing import SHARED, source_names
from eke.config.schema import MIXED, Data, Mix, Weighted

EXAMPLE = Fix(remark="data.sources=[{option:jsonl,path:FILE_OR_FOLDER,weight:1},...]")


def find_source_problems(data: Data) -> list[Problem]:
    """Everything that is wrong in the sources of a mix; nothing is wrong in other data."""
    if not isinstance(data, Mix):
        return []
    if not data.sources:
        return [Problem("data.sources", "[]", "a mix has at least one source", EXAMPLE)]
    each = range(len(data.sources))
    found = [problem for number in each for problem in _source(data.sources[number], number)]
    return found or list(_together(data))


def _source(source: dict[str, Any], number: int) -> Iterator[Problem]:
    option, key = source.get("option"), f"data.sources.{number}"
    if option not in MIXED:
        ending = option_for(str(source.get("path", "")))
        meant = closest(str(option), MIXED) or (ending if ending in MIXED else "jsonl")
        why = f"a source of a mix is one of {', '.join(MIXED)}"
        value = shown(format_value(option))
        yield Problem(f"data.sources[{number}].option", value, why, Fix(f"{key}.option={meant}"))
        return
    fields = dict(class_fields(MIXED[option]))
    for name, field in fields.items():
        if field.default == "???" and name not in source:
            fix = Fix(f"{key}.{name}={default_text(field, f'data.{name}')}")
            yield Problem(f"data.sources[{number}].{name}", "", f"{option} needs a value", fix)
    for name, value in source.items():
        why, fix = _wrong(name, value, key, dict(class_fields(Weighted)) | fields)
        if why and name != "option":
            text = shown(format_value(value))
            yield Problem(f"data.sources[{number}].{name}", text, why, fix)


def _wrong(name: str, value: Any, key: str, known: dict[str, Field]) -> tuple[str, Fix]:
    """Why one key of a source is wrong, and the fix; empty if it is right."""
    if name in SHARED:
        return "all sources share it", Fix(remark=f"data.{name}={value}, and not in the source")
    if name not in known:
        near = closest(name, known)
        fix = Fix(remark=f"write {near} in its place" if near else "remove it")
        return f"there is no such key: {', '.join(k for k in known if k not in SHARED)}", fix
    field = known[name]
    if not admits(field, value) or (isinstance(value, str) and field.kind in (bool, int, float)):
        return f"{field.words()} is wanted", Fix(f"{key}.{name}={probably_meant(field, value)}")
    if field.limit and value is not None and not field.limit.admits(value):
        return f"must be {field.limit.describe(value)}", Fix(f"{key}.{name}={field.default or 1}")
    return "", Fix()


def _together(mix: Mix) -> Iterator[Problem]:
    """Weights of some sources alone, and names that two have."""
    weights, names = [source.get("weight") for source in mix.sources], source_names(mix)
    given = [weight for weight in weights if weight is not None]
    for number, (weight, name) in enumerate(zip(weights, names, strict=True)):
        place, key = f"data.sources[{number}]", f"data.sources.{number}"
        if given and weight is None:
            why = f"{len(given)} of {len(weights)} sources have a weight: all have one, or none"
            fix = Fix(f"{key}.weight={format_value(min(given))}")
            yield Problem(f"{place}.weight", "null", why, fix)
        if name in names[:number]:
            why = f"is the name of data.sources[{names.index(name)}] too; losses are told by it"
            hub = "name" in dict(class_fields(MIXED[mix.sources[number]["option"]]))
            fix = Fix(remark="each split once") if hub else Fix(f"{key}.name={name}_{number}")
            yield Problem(f"{place}.name", name, why, fix)
