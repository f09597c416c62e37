"""Looking at files once, while many configurations are planned together."""

import functools
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_found: ContextVar[dict[Hashable, Any] | None] = ContextVar("found", default=None)


@contextmanager
def looking_once() -> Iterator[None]:
    """Context in which every text is as it was when it was first looked at.

    A thousand cells of a sweep would otherwise ask a thousand times for the size of each file.
    """
    token = _found.set({})
    try:
        yield
    finally:
        _found.reset(token)


def once(look: Callable[P, T]) -> Callable[P, T]:
    """The same function of hashable arguments, which within `looking_once` looks once at each."""

    @functools.wraps(look)
    def answer(*args: P.args, **kwargs: P.kwargs) -> T:
        found = _found.get()
        if found is None:
            return look(*args, **kwargs)
        key = (look, args, tuple(sorted(kwargs.items())))
        if key not in found:
            found[key] = look(*args, **kwargs)
        kept: T = found[key]
        return kept

    return answer
