"""Dataclasses to plain JSON values and back; a group with variants finds its class by fields."""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, cast

import cattrs

from eke.config.schema.config import VARIANTS, Config


@functools.cache  # 25 ms, and a sweep writes a thousand plans; immutable
def make_converter() -> cattrs.Converter:
    """A strict converter: unknown keys are errors, enums are written by value."""
    converter = cattrs.Converter(forbid_extra_keys=True)

    def unstructure(value: Any) -> dict[str, Any]:
        # By the value's own class, not by the class that the field is annotated with.
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
        cls = _class_of(value, classes, VARIANTS[group])
        if cls is None:
            raise ValueError(f"no variant of {group} has exactly the keys {sorted(value)}")
        # typeshed: `Field.type` may be text; without postponed annotations it is a type.
        kinds = {field.name: cast(Any, field.type) for field in dataclasses.fields(cls)}
        return cls(**{name: converter.structure(value[name], kinds[name]) for name in kinds})

    return structure


def _class_of(value: Any, classes: list[Any], variants: dict[str, type]) -> Any:
    """The class with exactly these keys; of several the one that is named as the option is."""
    keys = frozenset(value)
    fitting = [cls for cls in classes if {f.name for f in dataclasses.fields(cls)} == keys]
    named = variants.get(value.get("option", ""))
    return named if named in fitting else next(iter(fitting), None)
