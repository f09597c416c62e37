"""Settings of Hydra's own. Hydra only composes for eke's runs: what says how it runs has no effect.

Where Hydra itself runs the sweep (`by_hydra`), it reads them.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from eke.compose.wording import MULTIRUN, as_typed, closest, shown
from eke.errors import Problem

LAUNCHING = ("hydra/launcher", "hydra/sweeper")
"""Hydra's groups that say how the runs of a sweep are started."""

_FOLDER = "paths.runs={}"
_INSTEAD = {
    "hydra.run.dir": _FOLDER,
    "hydra.sweep.dir": _FOLDER,
    "hydra.sweeper.params": "sweep.product={{KEY:[VALUE,VALUE]}}",
    "hydra.job.env_set": "export NAME=VALUE   (before the command; runs inherit it)",
}
"""Setting, or the section it is in -> what does the same in eke."""

_FOUND_BY_HYDRA = ("hydra.overrides", "hydra.runtime", "hydra.searchpath", "hydra.job.override_dir")
"""Beginnings of what Hydra fills in itself for each composition."""


def is_launching(text: str) -> bool:
    """Whether an override says how runs are started, which no run has to know."""
    by_group = text.startswith(tuple(f"{group}=" for group in LAUNCHING))
    return by_group or text.startswith(("hydra.launcher.", "hydra.sweeper.", "hydra.mode=MULTIRUN"))


def is_for_hydra(key: str) -> bool:
    """Whether a key or group is Hydra's, not eke's."""
    return bool(re.match(r"hydra[./]|hydra$", key))


def check_setting(parsed: Override, raw: str) -> list[Problem]:
    """What is wrong with a setting of Hydra's for a run that eke starts."""
    key, text = parsed.key_or_group, parsed.input_line or ""
    if re.match(r"hydra[./](launcher|sweeper)\b", key) or text == "hydra.mode=MULTIRUN":
        why = "takes effect in a sweep only; without -m one run would start here"
        command = MULTIRUN if key == "hydra.mode" else f"{MULTIRUN} {as_typed(text)}"
        return [Problem(key, shown(raw), why, command)]
    if key == "hydra.searchpath":
        why = "your own options are found in a folder named by a flag"
        return [Problem(key, shown(raw), why, "--config-dir FOLDER")]
    if key == "hydra.mode":
        return [Problem(key, shown(raw), "-m alone says that it is a sweep", "leave it out")]
    return [_unused(key, raw)]


def _unused(path: str, raw: str) -> Problem:
    why = "is Hydra's own and has no effect: Hydra composes, and eke starts the runs"
    if near := closest(path, LAUNCHING) if "/" in path else None:
        return Problem(path, shown(raw), f"{why}; did you mean {near}?", as_typed(f"{near}={raw}"))
    fix = next((fix for key, fix in _INSTEAD.items() if f"{path}.".startswith(f"{key}.")), "")
    folder = "FOLDER" if "$" in raw else raw
    return Problem(path, shown(raw), why, fix.format(folder) if fix else "leave it out")


# --- in files -----------------------------------------------------------------------------------


def settings_of(tree: DictConfig) -> dict[str, Any]:
    """Every value of Hydra's part of a tree by its path, its own groups' options included."""
    content = OmegaConf.to_container(tree.hydra, resolve=False)
    found = {
        path: value
        for path, value in _leaves(content, "hydra")
        if not path.startswith(_FOUND_BY_HYDRA)
    }
    chosen = tree.hydra.runtime.choices
    return found | {str(g): o for g, o in chosen.items() if str(g).startswith("hydra/")}


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping) or not value:
        yield path, value
        return
    for key, item in value.items():
        yield from _leaves(item, f"{path}.{key}")


def explain_settings(settings: Mapping[str, Any], files: Sequence[Path]) -> list[Problem]:
    """What is wrong with settings of Hydra's in files, in the order they are found in.

    Args:
        settings: path -> value, as `settings_of` has them; only what files have changed.
        files: those that were chosen.
    """
    groups = [path for path in settings if "/" in path]
    # An option of one of its groups brings values, which follow from it.
    brought = tuple(f"{group.replace('/', '.')}." for group in groups)
    return [
        _in_file(path, str(value), files)
        for path, value in settings.items()
        if not path.startswith(brought)
    ]


def _in_file(path: str, raw: str, files: Sequence[Path]) -> Problem:
    where = _line_of(path, raw, files)
    if path in LAUNCHING:
        why = "a file says what runs compute; how they are started is typed"
        fix = f"{MULTIRUN} {as_typed(f'{path}={raw}')}   (and delete this line)"
        return Problem(where, f"{path}: {raw}", why, fix)
    told = _unused(path, raw)
    fix = f"delete it, and type {told.fix}" if "=" in told.fix else "delete it"
    return Problem(where, f"{path}: {shown(raw)}", told.why, fix)


def _line_of(path: str, raw: str, files: Sequence[Path]) -> str:
    """`FILE:LINE` that sets a value of Hydra's; the path itself if there is none to be found."""
    name = re.escape(re.split(r"[./]", path)[-1])
    key = rf"(^|[\s/{{,]){name}\s*:"
    for pattern in (rf"{key}\s*[\"']?{re.escape(raw)}", key):
        for file in files:
            text = file.read_text(errors="replace")
            for number, line in enumerate(text.splitlines() if "hydra" in text else [], start=1):
                if re.search(pattern, line, re.IGNORECASE):
                    return f"{file}:{number}"
    return path
