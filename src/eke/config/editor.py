"""JSON schemas (draft-07) of the files in `conf/`, and editor settings that refer to them."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from eke.common.errors import ConfigError, Problem
from eke.common.files import write_atomic
from eke.config.compose.catalogue import (
    FIXED_FIELDS,
    Catalogue,
    Field,
    class_fields,
    default_text,
    option_summaries,
    title,
)
from eke.config.compose.compose_cache import PRESETS
from eke.config.compose.composer import open_catalogue
from eke.config.parts import OWN
from eke.config.schema import ENTRIES, VARIANTS, Config
from eke.config.schema.fields import LARGEST, field_docs, summary

_Schema = dict[str, Any]

# Hydra reads YAML 1.1, which parses `on` as true. Files must quote "on".
_YAML_BOOLEANS = ("on", "off", "yes", "no", "y", "n", "true", "false")
# Interpolations are valid for any key. Composition resolves them.
_MARK = r"\$\{"
_INTERPOLATION: _Schema = {"$ref": "#/definitions/interpolation"}
DEFINITIONS: dict[str, _Schema] = {"interpolation": {"type": "string", "pattern": _MARK}}
"""Definitions required by every schema with keys."""

_TYPES: dict[type, str] = {bool: "boolean", int: "integer", float: "number", str: "string"}
_DRAFT = "http://json-schema.org/draft-07/schema#"  # the best supported draft
_OWN_VALUES = {"_self_": "Values of this file. The last entry, so that they take precedence."}

_CONFIG = "config"


def field_schema(field: Field, doc: str) -> _Schema:
    """Return the schema of one key: type, limits, enum values and description."""
    limit = f", {field.limit.describe(0)}" if field.limit else ""
    words = field.words()
    default = f" Default: {default_text(field)}." if field.default != "???" else " Required."
    about = f"{doc}\n\n{words[0].upper()}{words[1:]}{limit}.{default}".strip()
    described: _Schema = {"description": about}
    value = field.default.name if isinstance(field.default, Enum) else field.default
    if value not in ("???", *_YAML_BOOLEANS):  # an editor would insert it without quotes
        described["default"] = value
    schema = _value_schema(field)
    if "enum" in schema:
        return described | {"anyOf": [schema, _INTERPOLATION]}
    if schema.get("type") == "string":
        return described | schema
    # Not anyOf, so that editors report one specific error instead of all alternatives.
    return described | {"if": _INTERPOLATION, "then": {}, "else": schema}


def _value_schema(field: Field) -> _Schema:
    kind, is_list = field.kind, get_origin(field.kind) is list
    name = "array" if is_list else "object" if kind is dict else _TYPES.get(kind, "string")
    schema: _Schema = {"type": [name, "null"] if field.optional else name}
    if kind is str and str(field.default).isdecimal():  # a number or a word, as for sweep.repeats
        schema["type"] = [name, "integer"]
    if is_list:
        (item,) = get_args(kind)
        word = "array" if get_origin(item) is list else _TYPES.get(item, "object")
        return schema | {"items": {"type": word}}
    null = [None] if field.optional else []
    if kind is bool:
        return {"enum": [True, False, *null]}
    if issubclass(kind, Enum):
        members = list(kind.__members__)
        if not set(members) & set(_YAML_BOOLEANS):
            return {"enum": [*members, *null]}
        # Editors complete enums without the required quotes, but insert snippets unchanged.
        as_written = [f'"{m}"' if m in _YAML_BOOLEANS else m for m in members]
        snippets = [{"label": text, "body": text} for text in as_written]
        pattern = f"^({'|'.join(members)})$|{_MARK}"
        return schema | {"pattern": pattern, "defaultSnippets": snippets}
    if limit := field.limit:
        ends = {
            "exclusiveMinimum" if limit.low_open else "minimum": limit.low,
            "exclusiveMaximum" if limit.high_open else "maximum": limit.high,
        }
        for (name, end), widest in zip(ends.items(), (-LARGEST, LARGEST), strict=True):
            value = widest if end is None else end
            schema[name] = int(value) if float(value).is_integer() else value
    return schema


def _keys(cls: type) -> dict[str, _Schema]:
    docs = field_docs(cls)
    single = [(n, field) for n, field in class_fields(cls) if not is_dataclass(field.annotation)]
    return {name: field_schema(field, docs.get(name, "")) for name, field in single}


def _closed(properties: Mapping[str, Any]) -> _Schema:
    return {"type": "object", "properties": dict(properties), "additionalProperties": False}


def make_schemas(catalogue: Catalogue) -> dict[str, _Schema]:
    """Return group -> schema of its option files, and `config` -> schema of config.yaml."""
    entries = {"schema": "Types of all keys.", **_OWN_VALUES}
    whole = _full_schema(entries, list(catalogue.options), "", catalogue)
    schemas = {_CONFIG: {"title": "config.yaml", **whole}}
    for group in catalogue.options:
        if group in PRESETS:
            schemas[group] = _preset_file(group, catalogue)
        elif group in catalogue.sections:
            schemas[group] = _option_file(group, catalogue)
        elif group in ENTRIES:
            definitions = DEFINITIONS | {"entry": _closed(_keys(ENTRIES[group]))}
            entry = _hydras_or({"$ref": "#/definitions/entry"})
            schema = {"title": title(group), "type": "object", "additionalProperties": entry}
            schemas[group] = {"$schema": _DRAFT, **schema, "definitions": definitions}
    return schemas


def _hydras_or(body: _Schema) -> _Schema:
    """Return a schema that accepts Hydra's `_target_` with any arguments, or `body`."""
    return {"if": {"required": ["_target_"]}, "then": {}, "else": body}


def _option_file(group: str, catalogue: Catalogue) -> _Schema:
    """Return the schema of an option file. Its defaults list determines its fields."""
    variants = VARIANTS.get(group, {})
    base: type = get_type_hints(Config)[group]
    body: _Schema = {"$ref": f"#/definitions/{base.__name__}"}
    definitions = dict(DEFINITIONS)
    for cls in dict.fromkeys([*variants.values(), base]):
        definitions[cls.__name__] = _closed({"defaults": {}, **_keys(cls)})
    for name, cls in variants.items():
        options = _options_of(cls, group, catalogue)
        relative = [form for o in options for form in (o, f"/{group}/{o}@_here_")]
        chosen = {"enum": [_schema_entry(group, name), *relative]}
        then = {"$ref": f"#/definitions/{cls.__name__}"}
        body = {"if": _if_defaults_hold(chosen), "then": then, "else": body}
    return {
        "$schema": _DRAFT,
        "title": title(group),
        "description": summary(base),
        "type": "object",
        "properties": {"defaults": _option_defaults(group, catalogue)},
        "allOf": [
            _hydras_or(body) if group in OWN else body
        ],  # draft-07 ignores the siblings of a $ref
        "definitions": definitions,
    }


def _options_of(cls: type, group: str, catalogue: Catalogue) -> list[str]:
    return [o for o in catalogue.options[group] if catalogue.schema_class(group, o) is cls]


def _schema_entry(group: str, variant: str) -> str:
    return f"/schema/{group}/{variant}@_here_"


def _option_defaults(group: str, catalogue: Catalogue) -> _Schema:
    """Return the schema of the defaults list in the file of an option."""
    variants = VARIANTS.get(group, {})
    options = option_summaries(group, catalogue)
    entries = {_schema_entry(group, name): summary(cls) for name, cls in variants.items()}
    entries |= _OWN_VALUES | options
    entries |= {f"/{group}/{option}@_here_": about for option, about in options.items()}
    snippets = [
        {"label": f"fields of {name}", "body": [_schema_entry(group, name), "_self_"]}
        for name in variants
    ]
    about = "Schema of the fields, and an option to start from."
    schema: _Schema = {"description": about, "type": "array", "items": _choice(entries)}
    return schema | ({"defaultSnippets": snippets} if snippets else {})


def _preset_file(group: str, catalogue: Catalogue) -> _Schema:
    entries = _OWN_VALUES | option_summaries(group, catalogue)
    for other in PRESETS[: PRESETS.index(group)]:  # preceding entries in config.yaml
        options = option_summaries(other, catalogue)
        entries |= {f"/{other}/{option}": about for option, about in options.items()}
    groups = [name for name in catalogue.options if name not in (group, "sweep")]
    return {"title": title(group), **_full_schema(entries, groups, "override /", catalogue)}


def _full_schema(
    entries: dict[str, str], groups: Sequence[str], prefix: str, catalogue: Catalogue
) -> _Schema:
    """Return the schema of sections, single keys and Hydra's keys.

    The defaults list contains `entries` and choices of `groups` with `prefix` before the name. A
    chosen group has the keys of its option.
    """
    hints, single = get_type_hints(Config), _keys(Config)
    sections = {name: {"description": summary(hints[name])} for name in catalogue.sections}
    defaults = _defaults(entries, groups, prefix)
    hydra: _Schema = {"type": "object", "description": "Settings of Hydra."}
    return {
        "$schema": _DRAFT,
        **_closed({"defaults": defaults, **sections, **single, "hydra": hydra}),
        "allOf": [_section(name, prefix, catalogue) for name in catalogue.sections],
        "definitions": _definitions(groups, single, catalogue),
    }


def _definitions(
    groups: Sequence[str], single: dict[str, _Schema], catalogue: Catalogue
) -> dict[str, _Schema]:
    """Return the shared definitions: options of `groups`, and keys of all sections and sweeps."""
    definitions = dict(DEFINITIONS)
    about = {group: title(group) for group in groups}
    for group in groups:
        choice = _choice(option_summaries(group, catalogue))
        definitions[f"{group}_options"] = {"description": about[group], **choice}
    about |= {name: schema["description"] for name, schema in single.items()}
    for name, classes in catalogue.sections.items():
        each = {
            cls.__name__: {k: s for k, s in _keys(cls).items() if k not in FIXED_FIELDS}
            for cls in classes
        }
        keys = {k: s for own in reversed(each.values()) for k, s in own.items()}
        definitions |= {of: _closed(own) for of, own in each.items()} | {name: _closed(keys)}
        if name != "sweep":
            about |= {f"{name}.{key}": schema["description"] for key, schema in keys.items()}
    varied = {key: {"description": text} for key, text in about.items()}
    definitions["varied"] = _closed(varied) | {"type": ["object", "null"]}
    in_mapping = rf"^({'|'.join(OWN)})\.\w+\..|^({'|'.join(ENTRIES)})\."
    definitions["varied"]["patternProperties"] = {in_mapping: {}}
    for part in ("product", "zip", "rows"):
        value: _Schema = {"$ref": "#/definitions/varied"}
        value = {"additionalProperties": value} if part == "rows" else {"allOf": [value]}
        key = definitions["sweep"]["properties"][part]
        said = {"description": key["description"], "type": "object"}
        definitions["sweep"]["properties"][part] = said | value
    return definitions


def _section(group: str, prefix: str, catalogue: Catalogue) -> _Schema:
    """Return the schema of a section: fields of the chosen option, else of all options."""
    body: _Schema = {"properties": {group: {"$ref": f"#/definitions/{group}"}}}
    entry = f"{prefix}{group}"
    for cls in VARIANTS.get(group, {}).values():
        option = {"enum": _options_of(cls, group, catalogue)}
        chosen = {"type": "object", "required": [entry], "properties": {entry: option}}
        fields = {"properties": {group: {"$ref": f"#/definitions/{cls.__name__}"}}}
        body = {"if": _if_defaults_hold(chosen), "then": fields, "else": body}
    return body


def _if_defaults_hold(entry: _Schema) -> _Schema:
    defaults = {"type": "array", "contains": entry}
    return {"required": ["defaults"], "properties": {"defaults": defaults}}


def _defaults(entries: dict[str, str], groups: Sequence[str], prefix: str) -> _Schema:
    choices = {f"{prefix}{group}": {"$ref": f"#/definitions/{group}_options"} for group in groups}
    hydra = {f"override hydra/{name}_logging": {"type": "string"} for name in ("job", "hydra")}
    items = {
        "type": ["string", "object"],
        "if": {"type": "string"},
        "then": _choice(entries),
        "else": _closed(choices | hydra) | {"minProperties": 1, "maxProperties": 1},
    }
    about = "Option of each group, and files to start from."
    return {"description": about, "type": "array", "items": items}


def _choice(entries: dict[str, str]) -> _Schema:
    return {"enum": list(entries), "enumDescriptions": list(entries.values())}


def write_schemas(folder: Path, config_dir: Path | None = None) -> dict[str, Any]:
    """Write one JSON schema per kind of file into `folder` and return the editor settings."""
    catalogue = open_catalogue(config_dir)
    if folder.exists() and not folder.is_dir():
        problem = Problem("eke schema", str(folder), "is a file, not a folder", id="not_a_folder")
        raise ConfigError(problem)
    folder.mkdir(parents=True, exist_ok=True)
    schemas = make_schemas(catalogue)
    for name, schema in schemas.items():
        text = json.dumps(schema, indent=1, ensure_ascii=False) + "\n"
        write_atomic(folder / f"{name}.json", text, shared=True)
    place = os.path.relpath(folder)
    place = folder.resolve().as_uri() if place.startswith("..") else f"./{place}"
    folders = ["conf"]
    if config_dir:
        own = os.path.relpath(config_dir)
        # Editors only resolve globs inside their workspace.
        folders.append(f"**/{config_dir.resolve().name}" if own.startswith("..") else own)
    return editor_settings(schemas, place, folders)


def editor_settings(schemas: Iterable[str], place: str, folders: Sequence[str]) -> dict[str, Any]:
    """Return settings of the YAML language server that map schemas to files.

    `place` is the location of the schemas: `./` and a folder of the workspace, or a URL. `folders`
    contain options. They are relative to the folder that is open in the editor.
    """
    patterns = {name: [f"{folder}/{name}/*.yaml" for folder in folders] for name in schemas}
    patterns["sweep"].insert(0, "sweeps/*.yaml")
    patterns[_CONFIG] = [f"{folders[0]}/config.yaml"]  # only eke's folder has one
    return {
        "yaml.schemas": {f"{place}/{name}.json": globs for name, globs in patterns.items()},
        # As in Hydra, `on` is true and "on" is a string.
        "yaml.yamlVersion": "1.1",
    }
