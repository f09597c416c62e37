"""Classes of keys: which differences change the loss, the speed, both, or the work itself."""

from collections.abc import Collection, Mapping
from dataclasses import fields
from functools import cache
from typing import Any

from eke.config.schema import VARIANTS, Config
from eke.config.schema.fields import Affects
from eke.rules.techniques import TECHNIQUES, Numerics


def affects(key: str, values: Collection[str]) -> Affects:
    """Return the class of a key's difference, or *both* if one of the values changes more.

    `key` is a path of the configuration or a group. A key of another version counts as *both*.
    """
    found = _metadata().get(key)
    while found is None and "." in key:  # below a key whose value is a mapping
        key = key.rpartition(".")[0]
        found = _metadata().get(key)
    if found is None:
        return Affects.both
    is_off = found.get("is_off_at_zero") and not all(map(_is_positive, values))
    techniques = [TECHNIQUES.get(f"{key}={value}") for value in values]
    if is_off or any(each and each.numerics is Numerics.reduced for each in techniques):
        return Affects.both
    return Affects(found["affects"])


@cache
def _metadata() -> dict[str, Mapping[str, Any]]:
    """Return metadata by group and key. Keys without a class have the class of their group."""
    found: dict[str, Mapping[str, Any]] = {}
    for group in fields(Config):
        found[group.name] = group.metadata
        for cls in (group.default_factory, *VARIANTS.get(group.name, {}).values()):
            for each in fields(cls) if isinstance(cls, type) else ():
                known = each.metadata if "affects" in each.metadata else group.metadata
                found.setdefault(f"{group.name}.{each.name}", known)
    return found


def _is_positive(value: str) -> bool:
    try:
        return float(value) > 0
    except ValueError:
        return False
