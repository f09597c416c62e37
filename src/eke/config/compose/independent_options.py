"""Which option files write into their own section only, beside whatever else is chosen."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import yaml

from eke.config.compose.catalogue import Catalogue

PRESETS = ("recipe", "experiment", "sweep")
"""Groups whose files may write anywhere."""

_SCHEMA = re.compile(r"/schema/\w+/\w+@_here_")
_OPTION = re.compile(r"(?:/(?P<group>\w+)/)?(?P<option>[\w.-]+)(?P<here>@_here_)?")


def stands_alone(group: str, option: str, catalogue: Catalogue) -> bool:
    """Whether what an option does follows from itself, not from options of other groups.

    A preset may write anywhere: it does so if its defaults list is the same beside any options.
    Any other file must write into its own section only. Whatever is not surely so, is not.
    """
    file = catalogue.options.get(group, {}).get(option)
    if file is None:
        return False
    text = file.read_text()
    is_preset = group in PRESETS
    # https://hydra.cc/docs/advanced/overriding_packages/: elsewhere than in the group's section
    if not is_preset and re.search(r"^#\s*@package", text, flags=re.MULTILINE):
        return False
    content = yaml.safe_load(text) or {}
    entries = content.get("defaults") or []
    return all(_is_alone(entry, group, is_preset, catalogue) for entry in entries)


def _is_alone(entry: Any, group: str, is_preset: bool, catalogue: Catalogue) -> bool:
    """One entry of a defaults list: itself, a schema, an option to start from, or an override."""
    if isinstance(entry, dict):
        words = " ".join(map(str, [*entry.keys(), *entry.values()]))
        return is_preset and words.startswith("override /") and "$" not in words
    if entry == "_self_" or _SCHEMA.fullmatch(str(entry)):
        return True
    match = _OPTION.fullmatch(str(entry))
    if not match or (match["group"] and not match["here"] and not is_preset):
        return False  # `/model/tiny` without `@_here_` goes below the section
    return stands_alone(match["group"] or group, match["option"], catalogue)


def set_by_preset(group: str, option: str, catalogue: Catalogue) -> Iterator[str]:
    """What a preset's file sets, and the presets that it starts from."""
    file = catalogue.options.get(group, {}).get(option)
    if file is None:
        return
    content: dict[str, Any] = yaml.safe_load(file.read_text()) or {}
    for entry in content.pop("defaults", None) or []:
        yield from _of_entry(entry, group, catalogue)
    yield from _paths(content)


def _of_entry(entry: Any, group: str, catalogue: Catalogue) -> Iterator[str]:
    """One entry of a defaults list: `override /precision: bf16`, `/experiment/small`, `small`."""
    if isinstance(entry, Mapping):
        for key in entry:
            name = str(key).removeprefix("override ").lstrip("/")
            if name not in PRESETS:
                yield name
        return
    other, _, option = str(entry).lstrip("/").rpartition("/")
    if (other or group) in PRESETS:
        yield from set_by_preset(other or group, option, catalogue)


def _paths(content: Mapping[str, Any], above: Iterable[str] = ()) -> Iterator[str]:
    """The key path of every value."""
    for key, value in content.items():
        path = (*above, str(key))
        if isinstance(value, Mapping):
            yield from _paths(value, path)
        else:
            yield ".".join(path)
