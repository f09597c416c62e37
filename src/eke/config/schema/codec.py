"""Conversion of dataclasses to plain JSON values and back."""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, cast

import cattrs

from eke.config.schema.config import VARIANTS, Config


@functools.cache  # takes 25 ms, and a sweep writes up to a thousand plans
def make_converter() -> cattrs.Converter:
    """Return a strict converter. It rejects unknown keys and writes enums by value."""
    converter = cattrs.Converter(forbid_extra_keys=True)

    def unstructure(value: Any) -> dict[str, Any]:
        # The value may have a subclass of the annotated class.
        fields = dataclasses.fields(value)
        return {each.name: converter.unstructure(getattr(value, each.name)) for each in fields}

    hints = {f.name: f.type for f in dataclasses.fields(Config)}
    for group, variants in VARIANTS.items():
        base = hints[group]
        classes = [base, *variants.values()]
        converter.register_structure_hook_func(
            functools.partial(operator.is_, base), _variant_hook(converter, group, classes)
        )
        converter.register_unstructure_hook(base, unstructure)
    return converter


def _variant_hook(
    converter: cattrs.Converter, group: str, classes: list[Any]
) -> Callable[[Any, Any], Any]:
    def structure(value: Any, _: Any) -> Any:
        keys = frozenset(value)
        fitting = [c for c in classes if {f.name for f in dataclasses.fields(c)} == keys]
        if not fitting:
            raise ValueError(f"no variant of {group} has the keys {sorted(value)}")
        named: Any = VARIANTS[group].get(value.get("option", ""))
        cls = named if named in fitting else fitting[0]
        # `Field.type` is text only with postponed annotations, which eke does not use here.
        kinds = {field.name: cast(Any, field.type) for field in dataclasses.fields(cls)}
        return cls(**{name: converter.structure(value[name], kinds[name]) for name in kinds})

    return structure
