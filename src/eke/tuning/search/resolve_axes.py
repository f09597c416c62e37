"""What techniques say over settings that an experiment or a recipe has made.

A technique is spelt by an option and few keys. Where an experiment sets keys of the same group, an
option alone leaves them as they are: `memory=checkpointing` over `memory.every_n: 2` recomputes
every second layer, and is what `memory=checkpointing memory.every_n=2` is.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from eke.config.compose import Composed, compose
from eke.config.schema import Config
from eke.config.schema.codec import make_converter
from eke.tuning.search.axes import Axis, Value, group_of
from eke.tuning.search.trials import without

Key = tuple[str, str]
"""Group and field."""
Settings = Mapping[Key, Any]


def spelt_out(axis: Axis, baseline: Config, composed: Composed, own: Path | None) -> Axis:
    """The axis with values that mean what their names say, and none that is what was typed.

    Args:
        axis: of techniques that nobody has typed.
        baseline: what was typed, with what its experiment or recipe sets.
        composed: the same before its plan.
        own: the user's folder of options.
    """
    mine = {group_of(text) for value in axis.values for text in (value.name, *value.overrides)}
    open_groups = composed.choices.get("experiment", "none") == "none"
    if open_groups and not mine.intersection(map(group_of, composed.overrides)):
        return axis
    first, *others = axis.values
    by_name = replace(first, overrides=tuple(first.name.split()), usual=1.0)
    every = [by_name, *others]
    meant = {value: _settings(compose(value.overrides, own).config, value) for value in every}
    telling = _telling(list(meant.values()))
    now = _plain(baseline)
    typed = next((v for v in every if _agree(meant[v], now, telling)), None)
    if typed is None:
        typed = replace(by_name, name=f"{first.name}, as it is set", needless_beside=())
    others = [_explicit(v, meant[v], telling, composed, own) for v in every if v is not typed]
    scaled = [replace(value, usual=value.usual / typed.usual) for value in others]
    return Axis(axis.name, (replace(typed, overrides=(), usual=1.0), *scaled))


def _plain(config: Config) -> Settings:
    content = make_converter().unstructure(config)
    sections = {group: part for group, part in content.items() if isinstance(part, dict)}
    return {(group, key): each for group, part in sections.items() for key, each in part.items()}


def _settings(config: Config, value: Value) -> Settings:
    """Those of the groups that a value decides."""
    groups = {*map(group_of, value.overrides)}
    return {key: each for key, each in _plain(config).items() if key[0] in groups}


def _telling(meant: list[Settings]) -> set[Key]:
    """What tells values of one axis from each other; the rest, as a learning rate, stays."""
    first: dict[Key, Any] = {}
    return {
        key
        for settings in meant
        for key, each in settings.items()
        if first.setdefault(key, each) != each and (key[0] != "optimizer" or key[1] == "option")
    }


def _agree(meant: Settings, now: Settings, telling: set[Key]) -> bool:
    return all(now[key] == meant[key] for key in telling & meant.keys())


def _explicit(
    value: Value, meant: Settings, telling: set[Key], composed: Composed, own: Path | None
) -> Value:
    """The value with each key typed that would be another one without."""
    typed = without(composed.overrides, value.overrides)
    found = _plain(compose([*typed, *value.overrides], own, in_sweep=True).config)
    more = tuple(
        f"{group}.{key}={_text(meant[group, key])}"
        for group, key in sorted(telling & meant.keys())
        if key != "option" and found[group, key] != meant[group, key]
    )
    return replace(value, overrides=(*value.overrides, *more))


def _text(value: Any) -> str:
    """As it is typed."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
