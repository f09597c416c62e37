"""From the overrides of `-m` to the cells of a sweep: the product of all keys with many values."""

import itertools
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from omegaconf import OmegaConf

from eke.compose.catalogue import Catalogue, make_catalogue
from eke.errors import ConfigError, Problem

Cell = tuple[str, ...]
"""Overrides of one run."""

SEQUENTIAL = ("basic", "local")
"""Values of hydra/launcher that mean what happens anyway: one run after the other, here."""


def expand(overrides: Sequence[str], config_dir: Path | None = None) -> list[Cell]:
    """The cells of a sweep, in the order of the values as typed, the last key fastest.

    A named sweep's own values come last; a key that is typed as well replaces them.

    Raises:
        ConfigError: an override cannot be parsed, a pattern matches nothing, or another launcher or
            sweeper is asked for.
    """
    catalogue = make_catalogue(config_dir)
    typed = _parse(overrides)
    _refuse_launchers(typed)
    keys = {o.key_or_group for o in typed}
    named = [text for text in _named_sweep(typed, catalogue) if text.split("=")[0] not in keys]
    parsed = [*typed, *_parse(named)]
    values = [_values(o, catalogue) for o in parsed if not o.key_or_group.startswith("hydra")]
    return [tuple(cell) for cell in itertools.product(*values)]


def _named_sweep(typed: Sequence[Override], catalogue: Catalogue) -> list[str]:
    """What `sweep=NAME` varies, from its file; an unknown name is left to composition."""
    name = next((str(o.value()) for o in typed if o.key_or_group == "sweep"), "none")
    file = catalogue.options["sweep"].get(name)
    params = OmegaConf.select(OmegaConf.load(file), "hydra.sweeper.params") if file else None
    return [f"{key}={value}" for key, value in (params or {}).items()]


def _parse(overrides: Sequence[str]) -> list[Override]:
    parsed, problems = [], []
    parser = OverridesParser.create()
    for text in overrides:
        try:
            parsed.append(parser.parse_override(text))
        except Exception as error:  # the parser's own exceptions, of several kinds
            problems.append(Problem(text, "", str(error).splitlines()[0]))
    if problems:
        raise ConfigError(problems)
    return parsed


def _values(override: Override, catalogue: Catalogue) -> list[str]:
    """Every `key=value` an override stands for."""
    text = str(override.input_line)
    if not override.is_sweep_override():
        return [text]
    value = override.value()
    key = override.get_key_element()
    if isinstance(value, Glob):
        group = override.key_or_group
        matching = value.filter(list(catalogue.options.get(group, {})))
        if not matching:
            raise ConfigError(Problem(group, text, "matches no option of the group"))
        return [f"{key}={option}" for option in matching]
    return [f"{key}={item}" for item in override.sweep_string_iterator()]


def _refuse_launchers(overrides: Sequence[Override]) -> None:
    problems = [
        Problem(
            o.key_or_group,
            str(o.value()),
            "is not available yet: runs go one after the other on this machine",
            "hydra/launcher=basic",
        )
        for o in overrides
        if (o.key_or_group == "hydra/launcher" and o.value() not in SEQUENTIAL)
        or (o.key_or_group == "hydra/sweeper" and o.value() != "basic")
    ]
    if problems:
        raise ConfigError(problems)
