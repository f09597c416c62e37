"""Plugins: implementations found by name, built in or installed by another package."""

from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from eke.common.errors import EkeError

LAUNCHERS = "eke.launchers"
"""Entry point group: option of `hydra/launcher` -> class that implements `eke.launch.Launcher`."""

BUILT_IN: dict[str, dict[str, str]] = {
    LAUNCHERS: {
        "local": "eke.launch.local:LocalLauncher",
        "slurm": "eke.launch.slurm:SlurmLauncher",
    },
}
"""Group -> name -> `module:attribute`. Not declared as entry points: these are found without
reading the metadata of every installed package, which takes tens of milliseconds."""


@cache
def _installed(group: str) -> dict[str, EntryPoint]:
    return {found.name: found for found in entry_points(group=group)}


def plugin_names(group: str) -> list[str]:
    """Names of a group, built in first."""
    return list(dict.fromkeys([*BUILT_IN.get(group, {}), *_installed(group)]))


def has_plugin(group: str, name: str) -> bool:
    """Whether a group has this name."""
    return name in BUILT_IN.get(group, {}) or name in _installed(group)


@cache
def load_plugin(group: str, name: str) -> Any:
    """Import an implementation by its name.

    Raises:
        EkeError: there is none of this name, or it cannot be imported.
    """
    if reference := BUILT_IN.get(group, {}).get(name):
        module, _, attribute = reference.partition(":")
        return getattr(import_module(module), attribute)
    found = _installed(group).get(name)
    if found is None:
        raise EkeError(f"{group}: there is no {name}, only {', '.join(plugin_names(group))}")
    try:
        return found.load()
    except (ImportError, AttributeError) as error:
        package = found.dist.name if found.dist else "?"
        raise EkeError(f"{group}: {name} = {found.value} of {package}: {error}") from error
