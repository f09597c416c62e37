"""JSON schemas (draft-07) of the files in `conf/`, and the editor settings that refer to them.

There is one schema per group, and one for config.yaml.
"""

import json
import os
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from eke.common.errors import ConfigError, Problem
from eke.common.files import write_atomic
from eke.config.compose.arguments import check_folder
from eke.config.compose.catalogue import (
    FIXED_FIELDS,
    GROUPS,
    Catalogue,
    Field,
    class_fields,
    default_text,
    headline,
    make_catalogue,
)
from eke.config.schema import VARIANTS, Config, Limit, Sweep
from eke.config.schema.fields import LARGEST, field_docs, summary

Schema = dict[str, Any]
"""A JSON Schema."""

# YAML 1.1 (which Hydra reads) parses `on` as true, so a file must quote "on".
_YAML_BOOLEANS = ("on", "off", "yes", "no", "y", "n", "true", "false")
# Interpolations, which are resolved by composition and valid for any key.
_MARK = r"\$\{"
_INTERPOLATION: Schema = {"$ref": "#/definitions/interpolation"}
DEFINITIONS: dict[str, Schema] = {"interpolation": {"type": "string", "pattern": _MARK}}
"""Definitions required by every schema with keys."""

_TYPES: dict[type, str] = {bool: "boolean", int: "integer", float: "number", str: "string"}


def section_schema(cls: type, keys: Callable[[str], bool] | None = None) -> Schema:
    """Schema of the keys of one schema class.

    Args:
        cls: a dataclass of `eke.config.schema`.
        keys: the keys to include; if None, all except those that only option files set.
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
    """Schema of an object with these keys and no others."""
    return {"type": "object", "properties": dict(properties), "additionalProperties": False}


def field_schema(field: Field, doc: str) -> Schema:
    """Schema of one key: type, limits, enum values and description."""
    described: Schema = {"description": _description(field, doc)}
    default = field.default.name if isinstance(field.default, Enum) else field.default
    if default not in ("???", *_YAML_BOOLEANS):  # an editor would insert it without quotes
        described["default"] = default
    value = _value_schema(field)
    if "enum" in value:
        return described | {"anyOf": [value, _INTERPOLATION]}
    if value.get("type") == "string":
        return described | value
    # Not anyOf, so that editors report one specific error instead of all alternatives.
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
    """Schema of lists and mappings; eke checks all other types."""
    origin = get_origin(kind) or kind
    if origin is list:
        items = _TYPES.get(get_args(kind)[0])
        listed = ["array", "null"] if optional else "array"
        return {"type": listed, "items": {"type": items} if items else {}}
    return {"type": "object"} if origin is dict else {}


def _enum_schema(members: list[str], optional: bool) -> Schema:
    if not set(members) & set(_YAML_BOOLEANS):
        return {"enum": [*members, *([None] if optional else [])]}
    # Editors complete an enum without the required quotes, but insert a snippet unchanged.
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


PRESETS = ("recipe", "experiment", "sweep")
"""Groups whose files configure all sections (`# @package _global_`)."""

CONFIG = "config"
"""Name of the schema of config.yaml."""

_DRAFT = "http://json-schema.org/draft-07/schema#"  # the best supported draft
_HYDRA: Schema = {"type": "object", "description": "Hydra's own settings."}


def make_schemas(catalogue: Catalogue) -> dict[str, Schema]:
    """Group -> schema of its option files, and `config` -> schema of config.yaml."""
    groups = {
        group: _preset_file(group, catalogue)
        if group in PRESETS
        else _option_file(group, catalogue)
        for group in catalogue.options
        if group in PRESETS or group in catalogue.sections
    }
    return {CONFIG: _config_file(catalogue), **groups}


# --- option files -------------------------------------------------------------------------------


def _option_file(group: str, catalogue: Catalogue) -> Schema:
    """Schema of one section's values; the file's defaults list determines its fields."""
    variants = VARIANTS.get(group, {})
    base: type = get_type_hints(Config)[group]
    classes = list(dict.fromkeys([*variants.values(), base]))
    body: Schema = {"$ref": f"#/definitions/{base.__name__}"}
    for name, cls in variants.items():
        condition = _if_defaults_hold({"enum": _ways_to(group, name, catalogue)})
        body = {"if": condition, "then": {"$ref": f"#/definitions/{cls.__name__}"}, "else": body}
    definitions = DEFINITIONS | {cls.__name__: _option_keys(cls) for cls in classes}
    return {
        "$schema": _DRAFT,
        "title": f"{group}: {GROUPS.get(group, group)}",
        "description": summary(base),
        "type": "object",
        "properties": {"defaults": _option_defaults(group, catalogue)},
        "allOf": [body],  # draft-07 ignores the siblings of a $ref
        "definitions": definitions,
    }


def _option_keys(cls: type) -> Schema:
    keys = section_schema(cls, lambda name: True)
    keys["properties"] = {"defaults": {}, **keys["properties"]}
    return keys


def _ways_to(group: str, variant: str, catalogue: Catalogue) -> list[str]:
    """Defaults list entries that give an option file the fields of `variant`."""
    cls = VARIANTS[group][variant]
    options = [o for o in catalogue.options[group] if catalogue.schema_class(group, o) is cls]
    relative = [form for option in options for form in (option, f"/{group}/{option}@_here_")]
    return [_schema_entry(group, variant), *relative]


def _schema_entry(group: str, variant: str) -> str:
    return f"/schema/{group}/{variant}@_here_"


def _option_defaults(group: str, catalogue: Catalogue) -> Schema:
    variants = VARIANTS.get(group, {})
    entries = {_schema_entry(group, name): summary(cls) for name, cls in variants.items()}
    entries["_self_"] = "This file's own values; last, so that they win."
    entries |= {option: _about(file) for option, file in catalogue.options[group].items()}
    absolute = "|".join(map(re.escape, catalogue.options[group]))
    schema: Schema = {
        "description": "Whose fields the file has, and an option to start from.",
        "type": "array",
        "items": {
            "if": {"type": "string", "pattern": f"^/{group}/({absolute})@_here_$"},
            "then": {},
            "else": _choice(entries),
        },
    }
    if variants:
        schema["defaultSnippets"] = [
            {
                "label": f"fields of {name}",
                "description": summary(cls),
                "body": [_schema_entry(group, name), "_self_"],
            }
            for name, cls in variants.items()
        ]
    return schema


# --- files about the whole configuration --------------------------------------------------------


def _preset_file(group: str, catalogue: Catalogue) -> Schema:
    entries = {"_self_": "This file's own values; last, so that they win."}
    entries |= {option: _about(file) for option, file in catalogue.options[group].items()}
    for other in PRESETS[: PRESETS.index(group)]:  # the preceding entries in config.yaml
        for option, file in catalogue.options.get(other, {}).items():
            entries[f"/{other}/{option}"] = _about(file)
    groups = [name for name in catalogue.options if name not in (group, "sweep")]
    overrides = {f"override /{name}": _options(name) for name in groups}
    swept = _sweep_definitions(groups, catalogue) if group == "sweep" else {}
    return _whole(
        f"{group}: {GROUPS.get(group, group)}",
        "Starts with `# @package _global_`: its keys are those of the whole configuration.",
        _defaults("Options to choose, and files to start from.", entries, overrides),
        _whole_definitions(groups, catalogue) | swept,
        catalogue,
        "override /",
    )


def _config_file(catalogue: Catalogue) -> Schema:
    entries = {"schema": "The types of all keys.", "_self_": "This file's own values."}
    groups = {name: _options(name) for name in catalogue.options}
    defaults = _defaults("Which option each group starts from.", entries, groups)
    definitions = _whole_definitions(list(groups), catalogue)
    return _whole("config.yaml", "The primary configuration.", defaults, definitions, catalogue, "")


def _whole(
    title: str,
    about: str,
    defaults: Schema,
    definitions: dict[str, Schema],
    catalogue: Catalogue,
    prefix: str,
) -> Schema:
    """Schema of sections, single keys and Hydra's keys; a chosen group has its option's keys."""
    docs, hints = field_docs(Config), get_type_hints(Config)
    single = {
        name: field_schema(field, docs.get(name, ""))
        for name, field in class_fields(Config)
        if not is_dataclass(hints[name])
    }
    sections = {name: {"description": summary(hints[name])} for name in catalogue.sections}
    body = closed({"defaults": defaults, **sections, **single, "hydra": _HYDRA})
    return {
        "$schema": _DRAFT,
        "title": title,
        "description": about,
        **body,
        "allOf": [_section(name, prefix, catalogue) for name in catalogue.sections],
        "definitions": definitions,
    }


def _whole_definitions(groups: Sequence[str], catalogue: Catalogue) -> dict[str, Schema]:
    """Shared definitions: the options of `groups`, and the keys of every section."""
    definitions = DEFINITIONS | {f"{g}_options": _described_options(g, catalogue) for g in groups}
    for name, classes in catalogue.sections.items():
        each = [section_schema(cls) for cls in classes]
        union = {key: s for keys in reversed(each) for key, s in keys["properties"].items()}
        definitions[name] = closed(union)
        if len(classes) > 1:
            own = [_less(keys["properties"], union, f"#/definitions/{name}") for keys in each]
            definitions |= {c.__name__: keys for c, keys in zip(classes, own, strict=True)}
    return definitions


def _less(properties: dict[str, Schema], union: dict[str, Schema], place: str) -> Schema:
    """Keys of one variant; those equal to the section's refer to the section."""
    return closed(
        {
            key: {"$ref": f"{place}/properties/{key}"} if union[key] == schema else schema
            for key, schema in properties.items()
        }
    )


def _section(group: str, prefix: str, catalogue: Catalogue) -> Schema:
    """Section with the fields of the option chosen in the file, else of any option."""
    body: Schema = {"properties": {group: {"$ref": f"#/definitions/{group}"}}}
    for cls in VARIANTS.get(group, {}).values():
        options = [o for o in catalogue.options[group] if catalogue.schema_class(group, o) is cls]
        entry = f"{prefix}{group}"
        chosen: Schema = {
            "type": "object",
            "required": [entry],
            "properties": {entry: {"enum": options}},
        }
        fields = {"properties": {group: {"$ref": f"#/definitions/{cls.__name__}"}}}
        body = {"if": _if_defaults_hold(chosen), "then": fields, "else": body}
    return body


def _if_defaults_hold(entry: Schema) -> Schema:
    return {
        "required": ["defaults"],
        "properties": {"defaults": {"type": "array", "contains": entry}},
    }


def _defaults(description: str, entries: dict[str, str], groups: dict[str, Schema]) -> Schema:
    logging: Schema = {"type": "string", "description": "Hydra's own group."}
    hydra = {"override hydra/job_logging": logging, "override hydra/hydra_logging": logging}
    one = closed({**groups, **hydra}) | {"minProperties": 1, "maxProperties": 1}
    items = {
        "type": ["string", "object"],
        "if": {"type": "string"},
        "then": _choice(entries),
        "else": one,
    }
    return {"description": description, "type": "array", "items": items}


def _options(group: str) -> Schema:
    """Reference to the options of a group, in schemas that define them."""
    return {"$ref": f"#/definitions/{group}_options"}


def _described_options(group: str, catalogue: Catalogue) -> Schema:
    options = {option: _about(file) for option, file in catalogue.options[group].items()}
    return {"description": f"{group}: {GROUPS.get(group, group)}", **_choice(options)}


def _choice(entries: dict[str, str]) -> Schema:
    return {"enum": list(entries), "enumDescriptions": list(entries.values())}


def _about(file: Path) -> str:
    """Description of an option without its name."""
    return headline(file).partition(" -- ")[2] or headline(file)


def _sweep_definitions(groups: Sequence[str], catalogue: Catalogue) -> dict[str, Schema]:
    """Definitions of the section `sweep`, with checked keys in rows, zip and product.

    For sweep files only: these definitions would double the schemas of other presets.
    """
    keys = section_schema(Sweep)
    about = {name: each["description"] for name, each in keys["properties"].items()}
    for name in ("product", "zip"):
        varied = {"$ref": "#/definitions/varied"}
        keys["properties"][name] = {"description": about[name], "allOf": [varied]}
    rows = {"type": "object", "additionalProperties": {"$ref": "#/definitions/row"}}
    keys["properties"]["rows"] = {"description": about["rows"], **rows}
    named = {"$ref": "#/definitions/named"}
    return {
        "sweep": keys,
        "named": _named(groups, catalogue),
        "varied": {
            "type": "object",
            "allOf": [named],
            "properties": {name: _varied_options(name, catalogue) for name in groups},
            "additionalProperties": {"type": ["array", "string", "number", "boolean"]},
        },
        "row": {
            "type": ["object", "null"],
            "allOf": [named],
            "properties": {name: _options(name) for name in groups},
        },
    }


def _named(groups: Sequence[str], catalogue: Catalogue) -> Schema:
    """Keys that a sweep may vary. The referring schema defines the valid values of groups."""
    keys = {
        path: {"description": _key_doc(path, catalogue)}
        for path in catalogue.keys
        if path.rpartition(".")[2] not in FIXED_FIELDS and not path.startswith("sweep.")
    }
    return {"properties": {**dict.fromkeys(groups, True), **keys}, "additionalProperties": False}


def _key_doc(path: str, catalogue: Catalogue) -> str:
    section, _, name = path.rpartition(".")
    classes: tuple[Any, ...] = catalogue.sections.get(section, (Config,))
    return next((docs[name] for docs in map(field_docs, classes) if name in docs), "")


def _varied_options(group: str, catalogue: Catalogue) -> Schema:
    """Options as a list or comma-separated; eke checks patterns such as `glob(adamw*)`."""
    one = "|".join(map(re.escape, catalogue.options[group]))
    listed = ", ".join(catalogue.options[group])
    text: Schema = {
        "type": "string",
        "pattern": rf"^\s*({one})(\s*,\s*({one}))*\s*$|\(",
        "patternErrorMessage": f"Options of {group}, with commas between: {listed}",
    }
    return {
        "description": f"{GROUPS.get(group, group)}: {listed}",
        "if": {"type": "array"},
        "then": {"items": _options(group)},
        "else": text,
    }


def write_schemas(folder: Path, config_dir: Path | None = None) -> dict[str, Any]:
    """Write one JSON schema per kind of file into `folder`, creating it if missing.

    Args:
        folder: destination of the schemas.
        config_dir: a folder with the user's options, which the schemas then include.

    Returns:
        Settings of the YAML language server that map the schemas to files.

    Raises:
        ConfigError: `folder` is a file, or `config_dir` is invalid.
        OSError: `folder` cannot be written.
    """
    problems = check_folder(config_dir) if config_dir else []
    if problems:
        raise ConfigError(problems)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(Problem("eke schema", str(folder), "is a file, not a folder"))
    folder.mkdir(parents=True, exist_ok=True)
    schemas = make_schemas(make_catalogue(config_dir))
    for name, schema in schemas.items():
        write_atomic(folder / f"{name}.json", schema_text(schema), shared=True)
    folders = ["conf", *([_from_here(config_dir)] if config_dir else [])]
    return editor_settings(schemas, _place(folder), folders)


def schema_text(schema: dict[str, Any]) -> str:
    """Serialize a schema."""
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def editor_settings(schemas: Iterable[str], place: str, folders: Sequence[str]) -> dict[str, Any]:
    """Settings of the YAML language server that map schemas to files.

    Args:
        schemas: schema names of `make_schemas`.
        place: location of the schemas: `./` and a folder of the workspace, or a URL.
        folders: folders with options, relative to the folder open in the editor.
    """
    return {
        "yaml.schemas": {f"{place}/{name}.json": _patterns(name, folders) for name in schemas},
        # As in Hydra: `on` is true, "on" a string.
        "yaml.yamlVersion": "1.1",
    }


def _patterns(name: str, folders: Sequence[str]) -> list[str]:
    if name == CONFIG:
        return [f"{folder}/config.yaml" for folder in folders[:1]]  # only eke's folder has one
    own = [f"{folder}/{name}/*.yaml" for folder in folders]
    return ["sweeps/*.yaml", *own] if name == "sweep" else own


def _from_here(folder: Path) -> str:
    """Glob relative to the current folder; `**/NAME` for a folder outside of it."""
    relative = os.path.relpath(folder)
    return f"**/{folder.resolve().name}" if relative.startswith("..") else Path(relative).as_posix()


def _place(folder: Path) -> str:
    relative = os.path.relpath(folder)
    return folder.resolve().as_uri() if relative.startswith("..") else f"./{relative}"
