"""Import paths of the user's own code in a configuration."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from eke.config.schema import ENTRIES, Config

OWN = ("model", "data", "optimizer", "schedule", "loss")
"""Groups with an option `custom`, which has `target` and `args`."""

PATH_KEYS = (("data", "collate"), ("loss", "per"))
"""Further keys whose value may be an import path."""


@dataclass(frozen=True)
class Part:
    """One callable of the user's own code."""

    key: str
    """Key that names it: `model`, `data.collate`, `metrics.NAME`."""
    target: str
    """Import path with a colon before the name in the module: `package.module:Name`."""
    args: Mapping[str, Any]


def own_parts(config: Config) -> tuple[Part, ...]:
    """Return all parts that the configuration names, in a fixed order; none without own code."""
    return tuple(_parts(config))


def _parts(config: Config) -> Iterator[Part]:
    for group in OWN:
        section = getattr(config, group)
        if target := getattr(section, "target", None):
            yield Part(group, normalized(target), section.args)
    for group, name in PATH_KEYS:
        path = getattr(getattr(config, group), name, None)
        if path and is_path(path):
            yield Part(f"{group}.{name}", normalized(path), {})
    for group in ENTRIES:
        for name, entry in sorted(getattr(config, group).items()):
            yield Part(f"{group}.{name}", normalized(entry.target), entry.args)


def is_path(text: str) -> bool:
    """Return whether a text is an import path or a file, not the name of a key."""
    return bool(re.search(r"[.:/]", text))


def normalized(target: str) -> str:
    """Return an import path with a colon before the name: `net.GPT` -> `net:GPT`."""
    return target if ":" in target else ":".join(target.rsplit(".", 1))
