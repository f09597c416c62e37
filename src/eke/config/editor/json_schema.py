"""JSON Schema (draft-07) of single keys and of whole sections of the configuration."""

import types
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, get_args, get_origin

from eke.config.compose.catalogue import FIXED_FIELDS, Field, class_fields
from eke.config.compose.values import default_text
from eke.config.schema import Limit
from eke.config.schema.docs import field_docs
from eke.config.schema.limits import LARGEST

Schema = dict[str, Any]
"""A JSON Schema."""

# YAML 1.1 (which Hydra reads) takes `on` for true: a file must have "on", in quotes.
_YAML_BOOLEANS = ("on", "off", "yes", "no", "y", "n", "true", "false")
# Known only when the configuration is composed: any key may have it.
_MARK = r"\$\{"
_INTERPOLATION: Schema = {"$ref": "#/definitions/interpolation"}
DEFINITIONS: dict[str, Schema] = {"interpolation": {"type": "string", "pattern": _MARK}}
"""What each file with keys in it needs among its definitions."""

_TYPES: dict[type, str] = {bool: "boolean", int: "integer", float: "number", str: "string"}


def section_schema(cls: type, keys: Callable[[str], bool] | None = None) -> Schema:
    """The keys of one schema class and nothing else.

    Args:
        cls: a dataclass of `eke.config.schema`.
        keys: which of its keys; all but those that only an option's own file sets, if None.
    """
    wanted = keys or (lambda name: name not in FIXED_FIELDS)
    docs = field_docs(cls)
    properties = {
        name: field_schema(field, docs.get(name, ""))
        for name, field in class_fields(cls)
        if wanted(name)
    }
    return closed(properties)


def closed(properties: Mapping[str, Schema]) -> Schema:
    """An object that has these keys and no others."""
    return {"type": "object", "properties": dict(properties), "additionalProperties": False}


def field_schema(field: Field, doc: str) -> Schema:
    """One key: its type, its limits, its words, and what is said about it."""
    described: Schema = {"description": _description(field, doc)}
    default = field.default.name if isinstance(field.default, Enum) else field.default
    if default not in ("???", *_YAML_BOOLEANS):  # an editor would insert it without quotes
        described["default"] = default
    value = _value_schema(field)
    if "enum" in value:
        return described | {"anyOf": [value, _INTERPOLATION]}
    if value.get("type") == "string":
        return described | value
    # Not anyOf: editors then name the one thing that is wrong instead of all that could be meant.
    return described | {"if": _INTERPOLATION, "then": {}, "else": value}


def _value_schema(field: Field) -> Schema:
    kind = field.kind
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _enum_schema(list(kind.__members__), field.optional)
    name = _TYPES.get(kind)
    if name is None:
        return _container_schema(kind, field.optional)
    if field.kind is bool:
        return {"enum": [True, False, *([None] if field.optional else [])]}
    schema: Schema = {"type": [name, "null"] if field.optional else name}
    return schema | (_limit_schema(field.limit) if field.limit else {})


def _container_schema(kind: Any, optional: bool) -> Schema:
    """Lists and mappings; anything else is left to eke."""
    origin = get_origin(kind) or kind
    if origin is list:
        items = _TYPES.get(get_args(kind)[0])
        listed = ["array", "null"] if optional else "array"
        return {"type": listed, "items": {"type": items} if items else {}}
    return {"type": "object"} if origin is dict else {}


def _enum_schema(members: list[str], optional: bool) -> Schema:
    if not set(members) & set(_YAML_BOOLEANS):
        return {"enum": [*members, *([None] if optional else [])]}
    # An editor completes an enum without the quotes that such words need, but a snippet as it is.
    as_written = [f'"{m}"' if m in _YAML_BOOLEANS else m for m in members]
    return {
        "type": ["string", "null"] if optional else "string",
        "pattern": f"^({'|'.join(members)})$|{_MARK}",
        "patternErrorMessage": f"One of {', '.join(as_written)}",
        "defaultSnippets": [{"label": text, "body": text} for text in as_written],
    }


def _limit_schema(limit: Limit) -> Schema:
    schema: Schema = {}
    low = -LARGEST if limit.low is None else limit.low
    high = LARGEST if limit.high is None else limit.high
    schema["exclusiveMinimum" if limit.low_open else "minimum"] = _number(low)
    schema["exclusiveMaximum" if limit.high_open else "maximum"] = _number(high)
    return schema


def _number(value: float) -> float:
    return int(value) if float(value).is_integer() else value


def _description(field: Field, doc: str) -> str:
    limit = f", {field.limit.describe(0)}" if field.limit else ""
    known = isinstance(field.kind, type) and not isinstance(field.kind, types.GenericAlias)
    words = field.words() if known and get_origin(field.kind) is None else "see the documentation"
    default = f"; default {default_text(field)}" if field.default != "???" else "; no default"
    return f"{doc}\n\n{words[0].upper()}{words[1:]}{limit}{default}.".strip()
