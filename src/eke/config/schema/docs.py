"""What the string under a configuration field says about it, read from the source."""

import ast
import functools
import inspect
import itertools
import textwrap
from dataclasses import is_dataclass


def summary(cls: type) -> str:
    """The first paragraph of a class's docstring, on one line."""
    return _one_line((inspect.getdoc(cls) or "").partition("\n\n")[0])


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """Field -> the text under it, inherited fields included; a field without one is absent."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if is_dataclass(base):
            docs.update(_own_docs(base))
    return docs


def _own_docs(cls: type) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except OSError:  # an installation without sources has the keys, and no texts
        return {}
    [node] = ast.parse(source).body
    body = node.body if isinstance(node, ast.ClassDef) else []
    return {
        field.target.id: _one_line(text.value.value)
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if isinstance(text.value.value, str)
    }


def _one_line(text: str) -> str:
    return " ".join(text.split())
