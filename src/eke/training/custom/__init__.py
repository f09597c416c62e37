"""Own code of users in training: model, data, loss, metrics, callbacks, optimizer and schedule."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

from torch import Tensor, nn

from eke.common.errors import RunError
from eke.config.parts import Part, own_parts
from eke.config.schema import Config
from eke.plan.own_code import call_part, load_part


@dataclass(frozen=True)
class Origin:
    """Own code that built a model."""

    settings: dict[str, Any] | None
    """Content of the saved config.json. None for classes of transformers, which save their own."""
    layers: list[str] | None
    """Class names of repeated layers, None if they are found by structure."""


_ORIGIN = "_eke_origin"


def set_origin(model: nn.Module, origin: Origin) -> None:
    """Mark a model as own code."""
    vars(model)[_ORIGIN] = origin


def origin_of(model: nn.Module) -> Origin | None:
    """Return the origin of a model of own code, None for models of eke."""
    found: Origin | None = vars(model).get(_ORIGIN)
    return found


def is_plain(model: nn.Module) -> bool:
    """Return whether a model is own code without a configuration of transformers."""
    origin = origin_of(model)
    return origin is not None and origin.settings is not None


def find_part(config: Config, key: str) -> Part | None:
    """Return the own part of a key, None without one."""
    return next((part for part in own_parts(config) if part.key == key), None)


def bind_part(part: Part) -> Callable[..., Any]:
    """Return a part's function with its configured arguments, to be called repeatedly."""
    target = load_part(part)

    @wraps(target)
    def bind(**typed: Any) -> Callable[..., Any]:
        return partial(target, **typed)

    bound: Callable[..., Any] = call_part(part, load=bind)
    return bound


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function by name, {} if Python cannot read them."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # of a builtin function
        return {}


def takes_any(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Return whether a function accepts any names."""
    return any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def describe_shapes(value: Any) -> str:
    """Return types and shapes of a value of own code on one line."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {[*value.shape]}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{k}: {describe_shapes(v)}' for k, v in value.items())}}}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(describe_shapes, value))})"
    return type(value).__name__


def refuse(part: Part, why: str, fix: str = "") -> RunError:
    """Return an error about the result of a part, with its fix."""
    key = part.key if part.key in ("data.collate", "loss.per") else f"{part.key}.target"
    return RunError(f"{key} = {part.target}: {why}" + (f"\n  -> {fix}" if fix else ""))
