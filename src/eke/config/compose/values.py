"""Is a value of the type its key wants, and if not, which value was probably meant?"""

import re
from enum import Enum
from typing import Any, get_args, get_origin

from omegaconf import BooleanNode, EnumNode, FloatNode, IntegerNode, ListConfig, StringNode
from omegaconf.errors import OmegaConfBaseException

from eke.common.units import format_value
from eke.config.compose.catalogue import Field
from eke.config.compose.formatting import closest

# A placeholder that shows what belongs there; only mandatory texts have no default.
_PLACEHOLDER = "FILE_OR_FOLDER"
_PLACEHOLDERS = {
    "model.name_or_path": "FOLDER_OR_HUB_NAME",
    "data.name": "FOLDER_OR_HUB_NAME",
    "offload.path": "FOLDER",
}
PLACEHOLDERS = ("FILE_OR_FOLDER", "FOLDER_OR_HUB_NAME")
"""How the values end that stand for one of the user's."""
# What OmegaConf itself checks values with.
_NODES: dict[type, Any] = {
    bool: BooleanNode,
    int: IntegerNode,
    float: FloatNode,
    str: StringNode,
}


def is_interpolation(value: Any) -> bool:
    """Whether the value is known only when the whole configuration is."""
    return isinstance(value, str) and "${" in value


def admits(field: Field, value: Any) -> bool:
    """Whether the configuration would take `value` for this key, converting as OmegaConf does."""
    if value == "???":  # OmegaConf's mark of a missing value
        return False
    try:
        if field.kind is dict:
            return isinstance(value, dict)
        if get_origin(field.kind) is list:
            ListConfig(value, element_type=get_args(field.kind)[0], is_optional=field.optional)
        elif issubclass(field.kind, Enum):
            EnumNode(field.kind, value, is_optional=field.optional)
        else:
            _NODES[field.kind](value, is_optional=field.optional)
    except (OmegaConfBaseException, ValueError, TypeError):
        return False
    return True


def default_text(field: Field, key: str = "") -> str:
    """The schema's default as it is typed; what belongs there, by the key path, if it has none."""
    if field.default == "???":
        return _PLACEHOLDERS.get(key, _PLACEHOLDER)
    default = field.default
    return str(default.name) if isinstance(default, Enum) else format_value(default)


def probably_meant(field: Field, value: Any) -> str:
    """The right value nearest to a wrong one, as it is typed; the default when nothing is near."""
    return _nearest(field, value) or default_text(field)


def _nearest(field: Field, value: Any) -> str | None:
    if get_origin(field.kind) is list:
        return f"[{value}]" if isinstance(value, str) else None
    if issubclass(field.kind, Enum):
        return _nearest_member(list(field.kind.__members__), value)
    if field.kind is bool:
        words = {"true": "true", "false": "false", "enabled": "true", "disabled": "false"}
        near = closest(str(value), words)
        return words[near] if near else None
    if field.kind in (int, float) and not isinstance(value, bool):
        number = _leading_number(field.kind, str(value))
        sensible = number and (field.limit is None or field.limit.admits(float(number)))
        return number if sensible else None
    return None


def _nearest_member(members: list[str], value: Any) -> str | None:
    """`true` and `false` mean on and off where there are such members."""
    if isinstance(value, bool):
        if not value:
            return "off" if "off" in members else None
        return "on" if "on" in members else next(m for m in members if m != "off")
    return closest(str(value), members)


def _leading_number(kind: type, text: str) -> str | None:
    """`8 samples` -> 8, `1000.0` -> 1000, `4k` -> 4000; None without a number in front."""
    match = re.match(r"\s*([-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)\s*([kKM])?", text)
    if not match:
        return None
    number = float(match[1]) * {"k": 1e3, "K": 1e3, "M": 1e6}.get(match[2], 1)
    if abs(number) == float("inf"):
        return None
    return str(int(number)) if kind is int else f"{number:g}"
