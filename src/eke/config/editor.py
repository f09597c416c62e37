"""JSON Schema (draft-07) of single keys and of whole sections of the configuration.

JSON schemas of the files in `conf/`, for editors: one per group, and one for config.yaml.

The schemas as files in a folder, and the settings by which an editor finds them.
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


PRESETS = ("recipe", "experiment", "sweep")
"""Groups whose files are about the whole configuration (`# @package _global_`)."""

CONFIG = "config"
"""Name of the schema of config.yaml."""

_DRAFT = "http://json-schema.org/draft-07/schema#"  # what YAML language servers know best
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
    """Values of one section; whose fields it may have is said by the file's defaults list."""
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
        "allOf": [body],  # draft-07 ignores what stands beside a $ref
        "definitions": definitions,
    }


def _option_keys(cls: type) -> Schema:
    keys = section_schema(cls, lambda name: True)
    keys["properties"] = {"defaults": {}, **keys["properties"]}
    return keys


def _ways_to(group: str, variant: str, catalogue: Catalogue) -> list[str]:
    """What in a defaults list gives an option file the fields of `variant`."""
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
    for other in PRESETS[: PRESETS.index(group)]:  # what comes before it in config.yaml
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
    """Sections, single keys and Hydra's own; a group chosen in the file has that option's keys."""
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
    """What stands at several places once: the options of `groups`, and every section's keys."""
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
    """The keys of one variant; those that are the section's as well are said there."""
    return closed(
        {
            key: {"$ref": f"{place}/properties/{key}"} if union[key] == schema else schema
            for key, schema in properties.items()
        }
    )


def _section(group: str, prefix: str, catalogue: Catalogue) -> Schema:
    """A section with the fields of the option that the file chooses, else of any option."""
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
    """One option of a group, in files whose definitions have them."""
    return {"$ref": f"#/definitions/{group}_options"}


def _described_options(group: str, catalogue: Catalogue) -> Schema:
    options = {option: _about(file) for option, file in catalogue.options[group].items()}
    return {"description": f"{group}: {GROUPS.get(group, group)}", **_choice(options)}


def _choice(entries: dict[str, str]) -> Schema:
    return {"enum": list(entries), "enumDescriptions": list(entries.values())}


def _about(file: Path) -> str:
    """An option's first line, without its name."""
    return headline(file).partition(" -- ")[2] or headline(file)


def _sweep_definitions(groups: Sequence[str], catalogue: Catalogue) -> dict[str, Schema]:
    """The section `sweep` of a sweep's file: the keys that rows, zip and product name are checked.

    Elsewhere it is an object that nobody looks into: that would be half of each preset's schema.
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
    """Keys that a sweep may vary. What a group may be differs: who refers to this says it."""
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
    """Options, as a list or with commas between; patterns such as `glob(adamw*)` are eke's."""
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
    """Write one JSON schema per kind of file into `folder`, which is made if it is not there.

    Args:
        folder: where the schemas go.
        config_dir: a folder with the user's own options, which the schemas then know, too.

    Returns:
        Settings of the YAML language server that join the schemas and the files they are for.

    Raises:
        ConfigError: `folder` is a file, or something is wrong with `config_dir`.
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
    """A schema as it is written to a file."""
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def editor_settings(schemas: Iterable[str], place: str, folders: Sequence[str]) -> dict[str, Any]:
    """Settings of the YAML language server that join schemas and files.

    Args:
        schemas: the names `make_schemas` gives them.
        place: where the schemas are: `./` and a folder of the workspace, or a URL.
        folders: folders with options, relative to the one that is open in the editor.
    """
    return {
        "yaml.schemas": {f"{place}/{name}.json": _patterns(name, folders) for name in schemas},
        # What Hydra reads: `on` is true, and "on" a word.
        "yaml.yamlVersion": "1.1",
    }


def _patterns(name: str, folders: Sequence[str]) -> list[str]:
    if name == CONFIG:
        return [f"{folder}/config.yaml" for folder in folders[:1]]  # eke's own is the only one
    own = [f"{folder}/{name}/*.yaml" for folder in folders]
    return ["sweeps/*.yaml", *own] if name == "sweep" else own


def _from_here(folder: Path) -> str:
    """Relative to the current folder; from anywhere, for a folder outside of it."""
    relative = os.path.relpath(folder)
    return f"**/{folder.resolve().name}" if relative.startswith("..") else Path(relative).as_posix()


def _place(folder: Path) -> str:
    relative = os.path.relpath(folder)
    return folder.resolve().as_uri() if relative.startswith("..") else f"./{relative}"
