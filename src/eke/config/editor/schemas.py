"""JSON schemas of the files in `conf/`, for editors: one per group, and one for config.yaml."""

import re
from collections.abc import Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from eke.config.compose.catalogue import FIXED_FIELDS, GROUPS, Catalogue, class_fields, headline
from eke.config.editor.json_schema import DEFINITIONS, Schema, closed, field_schema, section_schema
from eke.config.schema import VARIANTS, Config, Sweep
from eke.config.schema.docs import field_docs, summary

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
