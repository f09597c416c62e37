"""Sources of data=mix: configuration, name and share of each source."""

import re
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from eke.common.errors import Fix, Problem
from eke.config.schema import MIXED, Config, HubRows, Mix
from eke.config.schema.codec import make_converter

SHARED = {each.name for each in fields(Mix)} - {"option", "num_samples", "sources"}
"""Keys that the sources take from the mix."""


def source_configs(config: Config) -> list[Config]:
    """Return one configuration per source of a mix, with the source as its data, else none."""
    mix, converter, found = config.data, make_converter(), []
    for source in mix.sources if isinstance(mix, Mix) else ():
        kind = MIXED[source["option"]]
        plain = converter.unstructure(kind())
        plain.update({name: value for name, value in source.items() if name in plain})
        shared = {name: getattr(mix, name) for name in SHARED}
        found.append(replace(config, data=replace(converter.structure(plain, kind), **shared)))
    return found


def source_names(mix: Mix) -> list[str]:
    """Return the names of the sources in metrics: letters, digits, `_`, `.` and `-`."""
    return [re.sub(r"[^\w.-]", "_", _name_of(source)) for source in mix.sources]


def _name_of(source: dict[str, Any]) -> str:
    if issubclass(MIXED[source["option"]], HubRows):
        folder = str(source["name"]).rstrip("/").rpartition("/")[2]
        parts = (folder, source.get("config_name"), source.get("split"))
        return "-".join(str(part) for part in parts if part)
    return str(source.get("name") or Path(source["path"]).name.partition(".")[0] or "source")


def source_shares(mix: Mix, sizes: Sequence[int]) -> list[float]:
    """Return the expected share of samples from each source, whose sizes are in samples."""
    pairs = zip(mix.sources, sizes, strict=True)
    weights = [size if source.get("weight") is None else source["weight"] for source, size in pairs]
    return [weight / sum(weights) for weight in weights]


def to_source_problem(problem: Problem, number: int) -> Problem:
    """Move key and fix of a source's problem to the keys of the mix."""

    def moved(text: str, place: str) -> str:
        key = re.sub("^data=", "data.option=", text).removeprefix("data.")
        own = key != text and key.partition("=")[0] not in SHARED
        return f"data.sources{place}.{key}" if own else text

    words = [moved(word, f".{number}") for word in problem.fix.words]
    fix = Fix(*words, remark=problem.fix.remark)
    return replace(problem, key=moved(problem.key, f"[{number}]"), fix=fix)
