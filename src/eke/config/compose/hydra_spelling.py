"""Conversion of Hydra's `_target_` in the user's option files to `target` and `args`."""

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from eke.common.errors import Fix
from eke.config.parts import OWN
from eke.config.schema import ENTRIES

_CALLED_LATER = ("optimizer", "schedule", "loss", "metrics")
"""Groups whose target eke calls with further arguments, as `_partial_: true` says."""

HYDRAS = ("_target_", "_args_", "_partial_", "_recursive_", "_convert_")
"""Keys that Hydra's `instantiate` interprets."""

_OWN_KEYS = {"optimizer": ("lr", "weight_decay")}
"""Group -> siblings of `_target_` that are keys of eke."""

_Wrong = tuple[str, str, str, Fix]
"""Key, value, reason and fix of a problem."""


def converted(file: Path, content: Any) -> tuple[Any, list[_Wrong]]:
    """Return the content of an option file with eke's keys, and what Hydra's keys must not say."""
    group, text = file.parent.name, file.read_text(encoding="utf-8")
    if "_target_" not in text or group not in (*OWN, *ENTRIES) or "@package _global_" in text:
        return content, []
    raw: Any = OmegaConf.to_container(content)
    if not isinstance(raw, dict):
        return content, []
    wrong: list[_Wrong] = []
    if group in ENTRIES:
        return {name: _converted(group, each, file, wrong) for name, each in raw.items()}, wrong
    return _converted(group, raw, file, wrong), wrong


def _converted(group: str, raw: Any, file: Path, wrong: list[_Wrong]) -> Any:
    if not isinstance(raw, dict) or "_target_" not in raw:
        return raw
    accepted = {"_convert_": "all", "_recursive_": True, "_partial_": group in _CALLED_LATER}
    for name in HYDRAS[1:]:
        if name in raw and raw[name] != accepted.get(name, ()):
            remark = f"write {name}: {str(accepted[name]).lower()}" if name in accepted else ""
            remark = remark or "delete this line, and give each argument by name"
            lines = file.read_text(encoding="utf-8").splitlines()
            number = next((n for n, line in enumerate(lines, 1) if name in line), 1)
            why = "eke passes arguments by name, and plain values"
            wrong.append((f"{file}:{number}", f"{name}: {raw[name]}", why, Fix(remark=remark)))
    own = {name: raw[name] for name in _OWN_KEYS.get(group, ()) if name in raw}
    rest = (*HYDRAS, "defaults", *own)
    part = {"target": raw["_target_"], "args": {k: v for k, v in raw.items() if k not in rest}}
    if group in ENTRIES:
        return part
    given = raw.get("defaults") or []
    bases = ["custom", *given, *([] if "_self_" in given else ["_self_"])]
    return {"defaults": bases, **part, **own}
