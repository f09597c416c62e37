"""Import of a target, and its arguments: checked against and converted to its signature's types."""

import dataclasses
import importlib
import inspect
import sys
import traceback
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from eke.common.errors import EkeError, Fix, Problem, RunError
from eke.common.text import first_line, format_value, suggest_match
from eke.config.parts import Part
from eke.plan.own_code.find import target_key
from eke.plan.own_code.frozen import is_served


class OwnCodeError(RunError):
    """Error that own code raised, with the line of its last frame."""

    id = "own_error"

    def __init__(self, said: str, part: Part) -> None:
        self.part = part
        super().__init__(said)


class _NoName(Exception):
    """A name is missing. `args`: the reason, and the path of the closest name, or None."""


def load_part(part: Part) -> Callable[..., Any]:
    """Import and return a target. OwnCodeError: It cannot be imported or called."""
    with named_errors(part, "importing"):
        try:
            found = _resolve(part.target.replace(":", "."))
        except _NoName as error:
            why, near = error.args
            fix = f"\n  -> {target_key(part)}={near}" if near else ""
            raise OwnCodeError(f"{target_key(part)} = {part.target}: {why}{fix}", part) from error
    if not callable(found):
        key, kind = target_key(part), type(found).__name__
        raise OwnCodeError(f"{key} = {part.target}: is not callable, but {kind}", part)
    return typing.cast(Callable[..., Any], found)


def _resolve(path: str) -> Any:
    """Return the object of a dotted path."""
    module = path.rpartition(".")[0]  # or shorter, for a method of a class
    while True:
        try:
            found: Any = importlib.import_module(module)
            break
        except ModuleNotFoundError as error:
            if (
                error.name is None
                or not f"{module}.".startswith(f"{error.name}.")
                or "." not in module
            ):
                raise
            module = module.rpartition(".")[0]  # the name of a class is not a module
    for name in path.removeprefix(module).strip(".").split("."):
        if not hasattr(found, name):
            near = suggest_match(name, [each for each in dir(found) if not each.startswith("_")])
            raise _NoName(f"{module} has no {name}", f"{module}.{near}" if near else None)
        found, module = getattr(found, name), f"{module}.{name}"
    return found


def call_part(part: Part, *given: Any, load: Callable[..., Any] | None = None, **named: Any) -> Any:
    """Call a target with its configured arguments and those of eke.

    OwnCodeError: The target, or a class that an argument builds, raises an exception.
    """
    target = load or load_part(part)
    with named_errors(part, "calling"):
        hints = _hints(target)
        typed = {
            name: _converted(value, hints.get(name, Any), f"{part.key}.args.{name}")
            for name, value in part.args.items()
        }
        return target(*given, **named, **typed)


class named_errors:
    """Context that converts any exception of own code to an OwnCodeError."""

    def __init__(self, part: Part, action: str) -> None:
        self.part, self.action = part, action

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, EkeError | KeyboardInterrupt | MemoryError):
            return
        said = type(error).__name__ + (f": {first_line(error)}" if str(error) else "")
        where = where_raised(error)
        named = f"{target_key(self.part)} = {self.part.target}"
        said = f"{named}: {said}{f' ({where})' if where else ''}, while {self.action} it"
        raise OwnCodeError(said, self.part) from error


def where_raised(error: BaseException) -> str:
    """Return `file:line` of the last frame in own code, "" without one."""
    frames = traceback.extract_tb(error.__traceback__)
    mine = [frame for frame in frames if is_served(frame.filename)]
    return f"{mine[-1].filename}:{mine[-1].lineno}" if mine else ""


def check_arguments(target: Callable[..., Any], part: Part, given: Sequence[str]) -> list[Problem]:
    """Return problems of a part's arguments. `given`: parameters that eke fills in by name.

    Parameters that eke passes by position are named `0`, `1`, ...
    """
    try:
        parameters = inspect.signature(target).parameters
    except (ValueError, TypeError):  # of a builtin function
        return []
    by_place = sum(name.isdecimal() for name in given)
    open_names = [p for p in list(parameters.values()) if p.kind is not p.VAR_POSITIONAL][by_place:]
    named = {p.name: p for p in open_names if p.kind not in (p.POSITIONAL_ONLY, p.VAR_KEYWORD)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    problems, hints = [], _hints(target)
    for name, value in part.args.items():
        key, shown = f"{part.key}.args.{name}", format_value(value)
        if name not in named and not takes_any:
            near = suggest_match(name, list(named))
            why = f"{part.target} has no parameter {name}. Parameters: {', '.join(named) or 'none'}"
            fix = Fix(f"{part.key}.args.{near}={shown}") if near else Fix(remark=f"remove {key}")
            problems.append(Problem(key, shown, why, fix, "no_parameter"))
            continue
        try:
            _converted(value, hints.get(name, Any), key)
        except _WrongValue as wrong:
            problems.append(wrong.problem)
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in {*part.args, *given}:
            key = f"{part.key}.args.{name}"
            why = f"{part.target} needs {name}"
            problems.append(Problem(key, "", why, Fix(f"{key}=VALUE"), "missing_value"))
    return problems


class _WrongValue(Exception):
    """A value does not have its parameter's type."""

    def __init__(self, key: str, value: Any, wanted: str, fix: Fix | None = None) -> None:
        self.problem = Problem(
            key, format_value(value), f"must be {wanted}", fix or Fix(), "wrong_type"
        )
        super().__init__(f"{key} must be {wanted}")


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    """Return parameter -> annotated type, {} if an annotation cannot be evaluated."""
    function: Any = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]  # of a class
    try:
        return typing.get_type_hints(function)
    except Exception:  # names that exist only for type checkers
        return {}


_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def _converted(value: Any, kind: Any, key: str) -> Any:
    """Return a value of the configuration as the annotated type. Raises _WrongValue."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _one_of(value, inner, key)
    if origin is typing.Literal:
        if value not in inner:
            raise _WrongValue(key, value, f"one of {', '.join(map(str, inner))}")
        return value
    if kind in (None, type(None)):
        if value is not None:
            raise _WrongValue(key, value, "null", Fix(f"{key}=null"))
        return None
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return kind(**dict(_fields(value, kind, key)))
    if (origin or kind) in (list, Sequence, tuple):
        return _listed(value, origin or kind, inner, key)
    if (origin or kind) in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise _WrongValue(key, value, "a mapping {a:1}")
        held = inner[1] if len(inner) > 1 else Any
        return {name: _converted(v, held, f"{key}.{name}") for name, v in value.items()}
    return _plain(value, kind, key)


def _listed(value: Any, kind: Any, inner: tuple[Any, ...], key: str) -> Any:
    """Return a list or tuple with converted items."""
    if not isinstance(value, list):
        raise _WrongValue(key, value, "a list [a,b]", Fix(f"{key}=[{format_value(value)}]"))
    kinds = inner[:1] * len(value)
    if kind is tuple and inner[1:] != (...,):
        kinds = inner or (Any,) * len(value)
        if len(kinds) != len(value):
            raise _WrongValue(key, value, f"a list of {len(kinds)}")
    kinds = kinds or (Any,) * len(value)
    each = [
        _converted(v, k, f"{key}.{n}") for n, (v, k) in enumerate(zip(value, kinds, strict=True))
    ]
    return tuple(each) if kind is tuple else each


def _plain(value: Any, kind: Any, key: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind in _WORDS:
        is_right = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if not is_right:
            raise _WrongValue(key, value, _WORDS[kind])
        return value
    if isinstance(kind, type) and issubclass(kind, Enum):
        members = {**{each.name: each for each in kind}, **{each.value: each for each in kind}}
        if value not in members:
            raise _WrongValue(key, value, f"one of {', '.join(kind.__members__)}")
        return members[value]
    if isinstance(kind, type) and issubclass(kind, Path) and isinstance(value, str):
        return kind(value)
    if getattr(kind, "__module__", "") == "torch" and getattr(kind, "__name__", "") == "dtype":
        torch = sys.modules["torch"]  # imported by own code; planning does not import it
        found = getattr(torch, str(value).removeprefix("torch."), None)
        if not isinstance(found, torch.dtype):
            near = [name for name in vars(torch) if isinstance(getattr(torch, name), torch.dtype)]
            raise _WrongValue(key, value, f"one of {', '.join(sorted(near))}")
        return found
    return value  # without an annotation, or of a type that is built by the target itself


def _one_of(value: Any, kinds: Sequence[Any], key: str) -> Any:
    """Return a value as the first fitting type of a union."""
    if value is None and type(None) in kinds:
        return None
    wrong: list[_WrongValue] = []
    # An exact type comes first: 1 is an int in `float | int`.
    for kind in sorted(kinds, key=lambda kind: kind is not type(value)):
        try:
            if kind is not type(None):
                return _converted(value, kind, key)
        except _WrongValue as error:
            wrong.append(error)
    if wrong:
        raise wrong[0]
    return value


def _fields(value: Mapping[str, Any], kind: type, key: str) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a dataclass from a mapping."""
    hints = typing.get_type_hints(kind)
    known = {field.name: field for field in dataclasses.fields(kind) if field.init}
    for name, each in value.items():
        if name not in known:
            near = suggest_match(name, list(known))
            fix = Fix(f"{key}.{near}={format_value(each)}") if near else Fix()
            wanted = f"a field of {kind.__name__}: {', '.join(known)}"
            raise _WrongValue(f"{key}.{name}", each, wanted, fix)
        yield name, _converted(each, hints[name], f"{key}.{name}")
    for name, field in known.items():
        missing = field.default is field.default_factory is dataclasses.MISSING
        if missing and name not in value:
            raise _WrongValue(f"{key}.{name}", "", "given", Fix(f"{key}.{name}=VALUE"))
