"""What the user has decided, so that a recipe's choices leave it alone; and composing once more."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import yaml

from eke.compose.alone import PRESETS
from eke.compose.catalogue import Catalogue, make_catalogue
from eke.compose.composer import Composed, compose
from eke.paths import conf_folder


def claims(composed: Composed) -> frozenset[str]:
    """Groups and key paths that were typed, or that the experiment sets: `precision`, `seed`.

    A named sweep stands before the recipe (docs/design/composing.md): its fixed settings are no
    claims, its rows are, since each cell has them as if they were typed.
    """
    typed = {text.lstrip("+~").partition("=")[0] for text in composed.overrides}
    catalogue = make_catalogue(composed.config_dir)
    experiment = composed.choices.get("experiment", "none")
    return frozenset(typed | set(_of_preset("experiment", experiment, catalogue)))


def is_set(composed: Composed, key: str) -> bool:
    """Whether a key has a value of the user's: typed, of an experiment, a sweep or an own option.

    Args:
        composed: what was asked for.
        key: `group.key`.
    """
    catalogue = make_catalogue(composed.config_dir)
    group, option = key.partition(".")[0], composed.choices.get(key.partition(".")[0], "")
    presets = {
        path
        for preset in ("sweep", "recipe")
        for path in _of_preset(preset, composed.choices.get(preset, "none"), catalogue)
    }
    file = catalogue.options.get(group, {}).get(option)
    own = file is not None and not file.is_relative_to(conf_folder())
    return own or key in presets | claims(composed)


def compose_with(composed: Composed, choices: Sequence[str]) -> Composed:
    """The same command without its recipe's fixed part, and with what the recipe chose instead.

    Args:
        composed: what was asked for.
        choices: overrides for groups and keys that nobody claims.

    Raises:
        ConfigError: they cannot be composed together.
    """
    typed = [text for text in composed.overrides if not text.startswith("recipe=")]
    return compose([*typed, "recipe=none", *choices], composed.config_dir, in_sweep=True)


def _of_preset(group: str, option: str, catalogue: Catalogue) -> Iterator[str]:
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
        yield from _of_preset(other or group, option, catalogue)


def _paths(content: Mapping[str, Any], above: Iterable[str] = ()) -> Iterator[str]:
    """The key path of every value."""
    for key, value in content.items():
        path = (*above, str(key))
        if isinstance(value, Mapping):
            yield from _paths(value, path)
        else:
            yield ".".join(path)
