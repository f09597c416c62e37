"""Fake tensors made quickly: what an operator gave once for these shapes, it gives again.

FakeTensorMode's own cache takes most of a trace's time to look at its arguments. Here a result is
remembered by the operator and the shapes, strides and formats of its arguments, for the life of the
process; only operators that make new tensors, and those that change one in place, are answered so.
"""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

aten: Any = torch.ops.aten

Key = tuple[Any, ...]
Made = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]
"""Shape, strides, format and device of a new tensor."""

_UNMARKED_VIEWS = frozenset({aten._unsafe_view.default, aten._reshape_alias.default})
"""Their schemas do not say that they return a view."""

_SLOW = object()
"""Stands for an operator or a call that FakeTensorMode must answer each time."""


def _kind(operator: Any) -> str:
    """`new`, `view`, `inplace` or `slow`: how an operator's results relate to its arguments."""
    tags = operator.tags
    if torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags:
        return "slow"
    schema = operator._schema
    if operator.namespace != "aten" or torch.Tag.inplace_view in tags:
        return "slow"
    results = [result.alias_info for result in schema.returns]
    if schema.is_mutable:
        first = schema.arguments[0].alias_info
        whole = len(results) == 1 and results[0] is not None and results[0].is_write
        named = schema.name.rstrip().endswith("_")
        return "inplace" if named and whole and first is not None and first.is_write else "slow"
    if not results:
        return "slow"
    if all(alias is None for alias in results):
        return "view" if operator in _UNMARKED_VIEWS else "new"
    return "view" if len(results) == 1 else "slow"


class Ghosts:
    """Answers operators on fake tensors of one device."""

    _kinds: dict[Any, str] = {}  # noqa: RUF012  # shared on purpose: the same in all traces
    _made: dict[Key, Any] = {}  # noqa: RUF012  # shared on purpose: the same in all traces

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode

    def answer(
        self, operator: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What the operator gives."""
        kind = self._kinds.get(operator)
        if kind is None:
            kind = self._kinds[operator] = _kind(operator)
        if kind == "inplace" and type(args[0]) is FakeTensor:
            return args[0]
        if kind == "view" and type(args[0]) is FakeTensor:
            return self._view(operator, types, args, kwargs)
        if kind != "new":
            return self._slowly(operator, types, args, kwargs)
        key = call_key(operator, args, kwargs)
        try:
            made = self._made.get(key)
        except TypeError:  # an argument that has no hash
            return self._slowly(operator, types, args, kwargs)
        if made is None:
            found = self._slowly(operator, types, args, kwargs)
            self._made[key] = _describe(found)
            return found
        if made is _SLOW:
            return self._slowly(operator, types, args, kwargs)
        if type(made) is list:
            return tuple(m if m is None else self._make(m) for m in made)
        return self._make(made)

    def _view(
        self, operator: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A view of the first argument."""
        viewed = args[0]
        key = (viewed.storage_offset(), call_key(operator, args, kwargs))
        made = self._made.get(key)
        if made is None:
            found = self._slowly(operator, types, args, kwargs)
            self._made[key] = _describe_view(found, viewed)
            return found
        if made is _SLOW:
            return self._slowly(operator, types, args, kwargs)
        shape, strides, offset, dtype = made
        with torch._C._DisableTorchDispatch():
            empty = torch.empty(0, dtype=dtype, device="meta")
            empty.set_(viewed.untyped_storage(), offset, shape, strides)
            return FakeTensor(self.mode, empty, viewed.fake_device)

    def _make(self, made: Made) -> FakeTensor:
        shape, strides, dtype, device = made
        with torch._C._DisableTorchDispatch():
            empty = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
            return FakeTensor(self.mode, empty, device)

    def _slowly(
        self, operator: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        with self.mode:
            return operator(*args, **kwargs)


def call_key(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key:
    """What tells a call from others: the operator, shapes, strides, formats and plain arguments."""
    return operator, _look(args), _look(kwargs) if kwargs else None


def _look(value: Any) -> Any:
    """All that the result can depend on, hashable where its parts are."""
    kind = type(value)
    if kind is FakeTensor:
        return value.shape, value.stride(), value.dtype, value.fake_device
    if kind is tuple or kind is list or kind is torch.Size:
        return tuple(map(_look, value))
    if kind is dict:
        return tuple((name, _look(part)) for name, part in value.items())
    if isinstance(value, torch.Tensor):
        return (value.shape, value.stride(), value.dtype, value.device)
    return kind, value


def _describe(found: Any) -> Any:
    """How to make a result again; `_SLOW` where that cannot be said."""
    if type(found) is FakeTensor:
        return _made_of(found)
    if isinstance(found, tuple | list):
        parts = [None if part is None else _made_of(part) for part in found]
        return _SLOW if _SLOW in parts else parts
    return _SLOW


def _describe_view(found: Any, viewed: Any) -> Any:
    if type(found) is not FakeTensor or found.dtype != viewed.dtype:
        return _SLOW
    if found.untyped_storage()._cdata != viewed.untyped_storage()._cdata:
        return _SLOW
    return tuple(found.shape), found.stride(), found.storage_offset(), found.dtype


def _made_of(found: Any) -> Any:
    whole = type(found) is FakeTensor and found.storage_offset() == 0
    if not whole or any(not isinstance(size, int) for size in tree_leaves(list(found.shape))):
        return _SLOW
    size = found.untyped_storage().nbytes()
    if size != found.numel() * found.itemsize:
        return _SLOW
    return tuple(found.shape), found.stride(), found.dtype, found.fake_device
