"""The sources of data=mix: each as data of its own, their names and shares, fixes of one of them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from eke.common.errors import Fix, Problem, is_placeholder
from eke.common.text import format_value
from eke.config.schema import MIXED, Config, Data, HubRows, Mix
from eke.config.schema.codec import make_converter

SHARED = {each.name for each in fields(Mix)} - {"option", "num_samples", "sources"}
"""Keys that the sources have of the mix."""

_PLAIN = re.compile(r"(?!(?:true|false|null|nan|inf)$)[A-Za-z_./][\w./%*@+-]*", re.IGNORECASE)
"""Texts that Hydra's grammar reads without quotes."""


def source_configs(config: Config) -> list[Config]:
    """The configuration with each source of its mix as the data; other data is its only source."""
    mix = config.data
    if not isinstance(mix, Mix):
        return [config]
    return [replace(config, data=_data_of(mix, source)) for source in mix.sources]


def _data_of(mix: Mix, source: Mapping[str, Any]) -> Data:
    kind, converter = MIXED[source["option"]], make_converter()
    names = {each.name for each in fields(kind)}
    given = {name: value for name, value in source.items() if name in names}
    made = converter.structure({**converter.unstructure(kind()), **given}, kind)
    return replace(made, **{name: getattr(mix, name) for name in SHARED})


def source_names(mix: Mix) -> list[str]:
    """Names of the sources as metrics have them: letters, digits, `_`, `.` and `-`."""
    return [re.sub(r"[^\w.-]", "_", _name_of(source)) for source in mix.sources]


def _name_of(source: Mapping[str, Any]) -> str:
    if issubclass(MIXED[source["option"]], HubRows):
        folder = str(source["name"]).rstrip("/").rpartition("/")[2]
        parts = (folder, source.get("config_name"), source.get("split"))
        return "-".join(str(part) for part in parts if part)
    return str(source.get("name") or Path(source["path"]).name.partition(".")[0] or "source")


def source_shares(mix: Mix, sizes: Sequence[int]) -> list[float]:
    """Expected fraction of the samples drawn from each source.

    Args:
        mix: either all of its sources have a weight, or none.
        sizes: samples of each source.
    """
    weights = [source.get("weight") for source in mix.sources]
    known = [size if weight is None else weight for weight, size in zip(weights, sizes, strict=True)]
    return [value / sum(known) for value in known]


def fix_source(mix: Mix, number: int, changes: Mapping[str, str | None], *words: str) -> Fix:
    """The override of all sources with keys of one changed, behind other words.

    Args:
        mix: whose sources are wrong.
        number: of the source to change.
        changes: key -> value as typed; None removes the key.
        words: other overrides that belong to the fix.
    """
    typed = [{key: _typed(value) for key, value in source.items()} for source in mix.sources]
    typed[number].update({key: value for key, value in changes.items() if value is not None})
    texts = (
        ",".join(
            f"{key}:{value}"
            for key, value in source.items()
            if at != number or changes.get(key, "") is not None
        )
        for at, source in enumerate(typed)
    )
    whole = f"data.sources=[{','.join(f'{{{text}}}' for text in texts)}]"
    if any(value is not None and is_placeholder(f"={value}") for value in changes.values()):
        return Fix(*words, remark=whole)
    return Fix(*words, whole)


def _typed(value: Any) -> str:
    if not isinstance(value, str) or _PLAIN.fullmatch(value):
        return format_value(value)
    escaped = re.sub(r'(\\*)"', lambda match: match[1] * 2 + '\\"', value)
    return f'"{escaped}"'


def in_source(problem: Problem, mix: Mix, number: int) -> Problem:
    """A problem of one source as data of its own, with key and fix of the mix."""
    words, changes = [], {}
    for word in problem.fix.words:
        key, _, value = word.partition("=")
        name = key.removeprefix("data.")
        if name == key or name in SHARED:
            words.append(word)
        else:
            changes[name] = value
    fix = Fix(*words, remark=problem.fix.remark)
    if changes:
        made = fix_source(mix, number, changes, *words)
        fix = Fix(*made.words, remark=made.remark or problem.fix.remark)
    name = problem.key.removeprefix("data.")
    own = name != problem.key and name not in SHARED
    return replace(problem, key=f"data.sources[{number}].{name}" if own else problem.key, fix=fix)
