"""Implementations found by name: eke's own, or entry points of installed packages."""

import sys
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from eke.common.errors import EkeError

OPTIMIZER_BUILDERS = "eke.training.optimizer.builders"
TRACE_WORKER = "eke.training.trace.trace_worker"
TRAINING_WORKER = "eke.training.loop.worker"
TRAINING_AGENT = "eke.training.loop.agent"
"""Modules of training that other packages load, or start as processes, by name.

All names of modules in texts are in this file, so that tests/unit/test_layers.py can check them.
"""

LAUNCHERS = "eke.launchers"
"""Group with option of `hydra/launcher` -> class that implements `eke.launch.Launcher`."""

_BUILT_IN: dict[str, dict[str, str]] = {
    LAUNCHERS: {
        "local": "eke.launch.local:LocalLauncher",
        "command": "eke.launch.command:CommandLauncher",
        "slurm": "eke.launch.slurm:SlurmLauncher",
    },
}
"""Group -> name -> `module:attribute`. Reading all packages' metadata would take longer."""


def plugin_names(group: str) -> list[str]:
    """Return the names in a group, eke's own first."""
    return list(dict.fromkeys([*_BUILT_IN.get(group, {}), *_installed(group, tuple(sys.path))]))


@cache  # takes 4 ms, and the status of a thousand runs calls it for each
def _installed(group: str, _path: tuple[str, ...]) -> list[str]:
    return [found.name for found in entry_points(group=group)]


def has_plugin(group: str, name: str) -> bool:
    """Return whether a group has this name."""
    return name in _BUILT_IN.get(group, {}) or name in plugin_names(group)


@cache
def load_plugin(group: str, name: str) -> Any:
    """Import the implementation of a name, None if unknown. EkeError if the import fails."""
    if reference := _BUILT_IN.get(group, {}).get(name):
        module, _, attribute = reference.partition(":")
        return getattr(import_module(module), attribute)
    for found in entry_points(group=group, name=name):
        try:
            return found.load()
        except (ImportError, AttributeError) as error:
            package = found.dist.name if found.dist else "an installed package"
            why = f"{group}: {name} = {found.value} of {package} cannot be imported: {error}"
            raise EkeError(why) from error
    return None
