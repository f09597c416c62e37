"""Checks of `data.sources`: each source against the schema of its option."""

from collections.abc import Iterator
from typing import Any

from eke.common.errors import Fix, Problem
from eke.common.text import closest, format_value
from eke.config.compose.catalogue import admits, class_fields, default_text, probably_meant, shown
from eke.config.compose.suggest import option_for
from eke.config.mixing import SHARED, source_names
from eke.config.schema import MIXED, Data, Mix, Weighted

EXAMPLE = Fix(remark="data.sources=[{option:jsonl,path:FILE_OR_FOLDER,weight:1},...]")
Wrong = tuple[int, str, Any, str, Fix | str]
"""Number of the source, key, value, why, and the fix, or the right value."""


def find_source_problems(data: Data) -> list[Problem]:
    """Everything that is wrong in the sources of a mix; nothing is wrong in other data."""
    if not isinstance(data, Mix):
        return []
    if not data.sources:
        return [Problem("data.sources", "[]", "a mix has at least one source", EXAMPLE)]
    found = [wrong for each in enumerate(data.sources) for wrong in _alone(*each)]
    problems = []
    for number, key, value, why, fix in found or _together(data):
        fix = Fix(f"data.sources.{number}.{key}={fix}") if isinstance(fix, str) else fix
        place, text = f"data.sources[{number}].{key}", shown(format_value(value))
        problems.append(Problem(place, text, why, fix))
    return problems


def _alone(number: int, source: dict[str, Any]) -> Iterator[Wrong]:
    option = source.get("option")
    if option not in MIXED:
        ending = option_for(str(source.get("path", "")))
        meant = closest(str(option), MIXED) or (ending if ending in MIXED else "jsonl")
        yield number, "option", option, f"is to be one of {', '.join(MIXED)}", str(meant)
        return
    fields = {**dict(class_fields(Weighted)), **dict(class_fields(MIXED[option]))}
    for key, field in fields.items():
        if field.default == "???" and key not in source:
            wanted = default_text(field, f"data.{key}")
            yield number, key, "", f"{option} needs a value for it", wanted
    for key, value in source.items():
        if key in SHARED:
            fix = Fix(remark=f"data.{key}={format_value(value)}, and not in the source")
            yield number, key, value, "all sources share it", fix
            continue
        if key not in fields:
            fix = Fix(remark=f"write {closest(key, fields) or ', '.join({*fields} - SHARED)}")
            yield number, key, value, f"{option} has no such key", fix
            continue
        field = fields[key]
        is_text = isinstance(value, str) and field.kind in (bool, int, float)
        if is_text or not admits(field, value):
            yield number, key, value, f"{field.words()} is wanted", probably_meant(field, value)
        elif field.limit and value is not None and not field.limit.admits(value):
            why = f"must be {field.limit.describe(value)}"
            yield number, key, value, why, format_value(field.default or 1)


def _together(mix: Mix) -> Iterator[Wrong]:
    """Weights of some sources alone, and names that two have."""
    weights, names = [source.get("weight") for source in mix.sources], source_names(mix)
    given = [weight for weight in weights if weight is not None]
    for number, (weight, name) in enumerate(zip(weights, names, strict=True)):
        if weight is None and (given or mix.is_stream):
            why = f"{len(given)} of {len(weights)} sources have a weight: all have one, or none"
            why = (
                "the rows of a stream are not counted: each source has one"
                if mix.is_stream
                else why
            )
            yield number, "weight", None, why, format_value(min(given, default=1))
        if name in names[:number]:
            why = f"is the name of data.sources[{names.index(name)}] too; losses are told by it"
            of_hub = "name" in dict(class_fields(MIXED[mix.sources[number]["option"]]))
            fix = Fix(remark="each split once") if of_hub else f"{name}_{number}"
            yield number, "name", name, why, fix
