"""Check the sources of a data mix."""

from collections.abc import Iterator
from typing import Any

from eke.common.errors import Fix, Problem
from eke.common.text import format_value
from eke.config.compose.catalogue import (
    class_fields,
    default_text,
    is_valid_value,
    shown,
    suggest_match,
    suggest_value,
)
from eke.config.compose.suggest import option_for
from eke.config.mixing import SHARED, source_names
from eke.config.schema import MIXED, Data, Mix, Weighted


def find_source_problems(data: Data) -> list[Problem]:
    """Return the problems in the sources of a mix. Other data has none."""
    if not isinstance(data, Mix):
        return []
    if not data.sources:
        fix = Fix(remark="data.sources=[{option:jsonl,path:FILE_OR_FOLDER,weight:1},...]")
        return [Problem("data.sources", "[]", "needs at least one source", fix, "wrong_source")]
    found = [problem for each in enumerate(data.sources) for problem in _check_source(*each)]
    return found or list(_check_shares(data))


def _source_problem(number: int, key: str, value: Any, why: str, fix: Fix | str) -> Problem:
    """Return the problem of a key of a source. A text as `fix` is the right value."""
    fix = Fix(f"data.sources.{number}.{key}={fix}") if isinstance(fix, str) else fix
    where = f"data.sources[{number}].{key}"
    return Problem(where, shown(format_value(value)), why, fix, "wrong_source")


def _check_source(number: int, source: dict[str, Any]) -> Iterator[Problem]:
    option = source.get("option")
    if option not in MIXED:
        ending = option_for(str(source.get("path", "")))
        meant = suggest_match(str(option), MIXED) or (ending if ending in MIXED else "jsonl")
        why = f"must be one of {', '.join(MIXED)}"
        yield _source_problem(number, "option", option, why, str(meant))
        return
    fields = {**dict(class_fields(Weighted)), **dict(class_fields(MIXED[option]))}
    for key, known in fields.items():
        if known.default == "???" and key not in source:
            wanted = default_text(known, f"data.{key}")
            yield _source_problem(number, key, "", f"{option} needs a value", wanted)
    for key, value in source.items():
        if key in SHARED:
            fix = Fix(remark=f"data.{key}={format_value(value)}, outside the sources")
            yield _source_problem(number, key, value, "is shared by all sources", fix)
            continue
        if key not in fields:
            fix = Fix(remark=f"write {suggest_match(key, fields) or ', '.join({*fields} - SHARED)}")
            yield _source_problem(number, key, value, f"unknown key of {option}", fix)
            continue
        known = fields[key]
        is_text = isinstance(value, str) and known.kind in (bool, int, float)
        if is_text or not is_valid_value(known, value):
            why = f"must be {known.words()}"
            yield _source_problem(number, key, value, why, suggest_value(known, value))
        elif known.limit and value is not None and not known.limit.admits(value):
            why = f"must be {known.limit.describe(value)}"
            yield _source_problem(number, key, value, why, format_value(known.default or 1))


def _check_shares(mix: Mix) -> Iterator[Problem]:
    weights, names = [source.get("weight") for source in mix.sources], source_names(mix)
    given = [weight for weight in weights if weight is not None]
    for number, (weight, name) in enumerate(zip(weights, names, strict=True)):
        if weight is None and (given or mix.is_stream):
            why = f"needs a weight, as {len(given)} of {len(weights)} sources have one"
            if mix.is_stream:
                why = "each source of a stream needs a weight"
            yield _source_problem(number, "weight", None, why, format_value(min(given, default=1)))
        if name in names[:number]:
            why = f"is also the name of data.sources[{names.index(name)}]"
            of_hub = "name" in dict(class_fields(MIXED[mix.sources[number]["option"]]))
            fix = Fix(remark="each split once") if of_hub else f"{name}_{number}"
            yield _source_problem(number, "name", name, why, fix)
