"""Groups, options and keys, read from `conf/` and the schema. Check values by type."""

import dataclasses
import math
import re
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache, cached_property
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import yaml
from omegaconf import (
    BooleanNode,
    EnumNode,
    FloatNode,
    IntegerNode,
    ListConfig,
    OmegaConf,
    StringNode,
)
from omegaconf.errors import OmegaConfBaseException

from eke.common.paths import conf_folder
from eke.common.text import format_value
from eke.common.text import suggest_match as suggest_match
from eke.config.compose.hydra_spelling import converted
from eke.config.schema import ENTRIES, VARIANTS, Config, Limit
from eke.config.schema.fields import field_docs

GROUPS: dict[str, tuple[str, str]] = {
    "model": ("architecture and size", "tiny bert_base gpt2 t5_base llama_1b pretrained"),
    "task": ("training objective", ""),
    "data": ("training data", "python_source text jsonl parquet csv hub chat"),
    "batch": ("samples per step", "fixed auto"),
    "precision": ("number formats", "fp32 tf32 bf16 fp16 fp8"),
    "optimizer": ("update rule and its state", "adamw adafactor adamw_8bit lion muon sgd"),
    "schedule": ("learning rate over steps", ""),
    "loss": ("training loss", ""),
    "metrics": ("metrics of your own", ""),
    "callbacks": ("callbacks of your own", ""),
    "memory": ("activation memory", "none checkpointing activation_offload"),
    "attention": ("attention implementation", "auto sdpa flash2 flash3 eager"),
    "compile": ("torch.compile", "none inductor"),
    "kernels": ("fused operations", "none liger fused_linear_cross_entropy"),
    "distributed": ("processes and sharding", "none ddp fsdp zero2 zero3"),
    "offload": ("state off the device", "none optimizer_cpu params_cpu"),
    "dataloader": ("loading of batches", ""),
    "peft": ("trained weights", "none lora qlora"),
    "engine": ("training loop", ""),
    "tracker": ("experiment tracker", "wandb mlflow tensorboard none"),
    "hardware": ("device to plan for", "auto cpu rtx4090 a100_80 h100 h200"),
    "slurm": ("cluster for sweeps (-m)", ""),
    "recipe": ("named set of techniques", "none fastest low_memory"),
    "experiment": ("named configuration", "none smoke debug"),
    "sweep": ("named set of runs (-m)", "none demo guide_table precision_ladder"),
}
"""Group -> its description, and its options on the help page (empty: all). Others come last."""

LABELS = ("model", "precision", "memory", "dataloader", "slurm")
"""Groups whose `option` is only a name, so a user's file may use a new one."""

SECRET_FIX = "export NAME=...   (in the shell, or a file: slurm.setup=['export NAME=$(cat FILE)'])"

FIXED_FIELDS = ("option", "family")
"""Fields that only option files set."""

_KIND_NAMES = {
    bool: "true or false", int: "a whole number", float: "a number", str: "text",
    dict: "a mapping",
}  # fmt: skip


@dataclass(frozen=True)
class Field:
    """One key of a schema class."""

    annotation: type
    """Declared type: `int | None`, an Enum class, ..."""
    default: Any
    """Default of the schema, `None` if there is none."""
    limit: Limit | None = None

    @property
    def optional(self) -> bool:
        """True if null is a valid value."""
        return NoneType in get_args(self.annotation)

    @property
    def kind(self) -> type:
        """Type without `None`."""
        if get_origin(self.annotation) is dict:
            return dict
        kinds: list[type] = [arg for arg in get_args(self.annotation) if arg is not NoneType]
        return kinds[0] if isinstance(self.annotation, UnionType) else self.annotation

    def words(self) -> str:
        """Return a description of valid values: `a whole number or null`."""
        if get_origin(self.kind) is list:
            wanted = "a list [a,b]"
        elif issubclass(self.kind, Enum):
            wanted = "one of " + ", ".join(self.kind.__members__)
        else:
            wanted = _KIND_NAMES[self.kind]
        return f"{wanted} or null" if self.optional else wanted


@dataclass(frozen=True)
class Catalogue:
    """Options found in the config folders, and all keys of the schema."""

    folders: tuple[Path, ...]
    """Config folders in order of precedence, as in Hydra's search path."""

    @property
    def own_folder(self) -> Path | None:
        """Folder with the user's options, None without one."""
        return self.folders[1] if len(self.folders) > 1 else None

    @cached_property
    def options(self) -> dict[str, dict[str, Path]]:
        """Group -> option -> file, with groups in the order of `GROUPS`."""
        found: dict[str, dict[str, Path]] = {group: {} for group in GROUPS}
        for folder in self.folders:
            for group in sorted(p for p in folder.iterdir() if p.is_dir()):
                if group.name in ("hydra", "schema") or group.name.startswith("."):
                    continue
                files = found.setdefault(group.name, {})
                for file in sorted(group.glob("*.yaml")):
                    files.setdefault(file.stem, file)
        return {group: files for group, files in found.items() if files}

    @cached_property
    def defaults(self) -> dict[str, str]:
        """Group -> default option (from `config.yaml`)."""
        text = (self.folders[0] / "config.yaml").read_text()
        return dict(re.findall(r"^  - (\w+): (\w+)$", text, flags=re.MULTILINE))

    def without_effect(self, group: str) -> str:
        """Return the option without effect if there is one, else the default."""
        options = self.options[group]
        return "none" if "none" in options else self.defaults.get(group, next(iter(options)))

    @cached_property
    def sections(self) -> dict[str, tuple[type, ...]]:
        """Section of the configuration -> its possible schema classes."""
        hints: dict[str, type] = get_type_hints(Config)
        return {
            name: tuple(VARIANTS[name].values()) if VARIANTS.get(name) else (kind,)
            for name, kind in hints.items()
            if is_dataclass(kind)
        }

    @cached_property
    def keys(self) -> dict[str, Field]:
        """Key of any composition -> field."""
        keys: dict[str, Field] = {}
        for section, classes in self.sections.items():
            for cls in reversed(classes):
                for name, found in class_fields(cls):
                    key = f"{section}.{name}"
                    # If only some options permit null, composition decides.
                    if found.optional or not (key in keys and keys[key].optional):
                        keys[key] = found
        root = {n: f for n, f in class_fields(Config) if n not in self.sections}
        return {**keys, **root}

    def is_entry(self, key: str) -> bool:
        """Return whether a key is inside a mapping with arbitrary keys: `trainer.extra.debug`."""
        mapping, _, name = key.rpartition(".")
        if match := re.fullmatch(r"(.+)\.\d+", mapping):  # `data.sources.1.weight`
            kinds = get_args(self.keys[match[1]].kind) if match[1] in self.keys else ()
            return get_origin(next(iter(kinds), None)) is dict
        while mapping and name:  # `model.args.config.depth`
            if mapping in self.keys:
                return self.keys[mapping].kind is dict
            mapping = mapping.rpartition(".")[0]
        return False

    def names(self, section: str) -> list[str]:
        """Return the keys of a section without prefix and without fixed keys."""
        prefix = f"{section}."
        names = [key.removeprefix(prefix) for key in self.keys if key.startswith(prefix)]
        return [name for name in names if name not in FIXED_FIELDS]

    def schema_class(self, group: str, option: str) -> type:
        """Return the schema class of an option or its base, else the first of the group."""
        for text in self.texts(group, option):
            match = re.search(rf"/schema/{group}/(\w+)@_here_", text)
            if match and match[1] in VARIANTS.get(group, ()):
                return VARIANTS[group][match[1]]
        return self.sections[group][0] if group in self.sections else ENTRIES[group]

    def texts(self, group: str, option: str) -> list[str]:
        """Return the contents of an option's file and of its bases' files."""
        files, texts = self.options.get(group, {}), dict[str, str]()
        entry = rf"^\s*- *(?:/{group}/)?(?!_self_)(\w+)(?:@_here_)?\s*$"
        while option in files and option not in texts:
            texts[option] = _read(files[option])
            base = re.search(entry, texts[option], flags=re.MULTILINE)
            option = base[1] if base else option
        return list(texts.values())

    def values(self, group: str, option: str) -> dict[str, Any]:
        """Return the values of an option's file and of its bases' files."""
        found: dict[str, Any] = {}
        for text in reversed(self.texts(group, option)):
            values = yaml.safe_load(text) or {}
            found |= values.get(group, {}) if "@package _global_" in text else values
        found.pop("defaults", None)
        return found

    def options_with(self, group: str, name: str) -> list[str]:
        """Return the options of a group that have the key `group.name`."""
        return [
            option
            for option in self.options.get(group, {})
            if name in dict(class_fields(self.schema_class(group, option)))
        ]


def _read(file: Path) -> str:
    """Return an option file's text, with the keys of eke in place of Hydra's `_target_`."""
    text = file.read_text()
    with suppress(OmegaConfBaseException, yaml.YAMLError):
        if "_target_" in text:
            return OmegaConf.to_yaml(OmegaConf.create(converted(file, OmegaConf.create(text))[0]))
    return text


REQUIRED = "required"


@dataclass(frozen=True)
class KeyRow:
    """One key as help and reference show it."""

    key: str
    """Key as on the command line: `optimizer.lr`."""
    type: str
    """Valid values: `a number`, `one of auto, on, off`."""
    limits: str
    """Valid range of a number: `above 0 and at most 100`. Empty without one."""
    default: str
    """Value of a run without this key, as on the command line, or `required`."""
    null: str
    """Meaning of the default null. Empty for other defaults."""
    about: str
    """Description, without `null`."""

    @property
    def shown_default(self) -> str:
        """The default, with its meaning if it is null: `null: 300`."""
        return f"null: {self.null}" if self.null else self.default

    @property
    def default_words(self) -> str:
        """The default as text: `default 0.001`, `required`."""
        return self.default if self.default == REQUIRED else f"default {self.shown_default}"


def key_rows(section: str, option: str, catalogue: Catalogue) -> list[KeyRow]:
    """Return the keys of a section with one option, with the defaults of its file.

    `option` is empty for a section without options. The section "" has the keys without section.
    Keys that eke fills in are absent.
    """
    cls = ENTRIES.get(section, Config)
    if section in catalogue.sections:
        cls = catalogue.schema_class(section, option)
    prefix = f"{section}.NAME" if section in ENTRIES else section
    values, docs = catalogue.values(section, option), field_docs(cls)
    return [
        _key_row(
            f"{prefix}.{name}".lstrip("."),
            dataclasses.replace(field, default=values.get(name, field.default)),
            docs.get(name, ""),
        )
        for name, field in class_fields(cls)
        if name not in (*FIXED_FIELDS, *((*catalogue.sections, *ENTRIES) if not section else ()))
        and not docs.get(name, "").startswith("Filled in")
    ]


_NULL = re.compile(r"\s*\bnull: (.+?)\.(?=\s|$)")
"""Sentence of a description with the meaning of null."""


def _key_row(key: str, field: Field, doc: str) -> KeyRow:
    default = default_text(field) or "''"
    if field.default == "???":
        default = REQUIRED
    elif field.kind is float and default != "null":
        default = f"{float(default):g}"
    meaning = _NULL.search(doc) if default == "null" else None
    about = _NULL.sub("", doc, count=1) if meaning else doc
    limits = field.limit.describe(0) if field.limit else ""
    null = meaning[1].replace("`", "") if meaning else ""
    return KeyRow(key, field.words(), limits, default, null, about)


def class_fields(cls: type) -> tuple[tuple[str, Field], ...]:
    """Return name and type of each field of a schema class."""
    return _class_fields(cls)


@cache  # separate: mypy 2.4 treats classes of unhashable objects as unhashable
def _class_fields(cls: type) -> tuple[tuple[str, Field], ...]:
    hints = get_type_hints(cls)
    return tuple((item.name, _field(item, hints[item.name])) for item in fields(cls))


def _field(item: "dataclasses.Field[Any]", annotation: Any) -> Field:
    default = None if item.default is MISSING else item.default
    if item.default_factory is not MISSING and get_origin(annotation) in (dict, list):
        default = item.default_factory()
    return Field(annotation=annotation, default=default, limit=item.metadata.get("limit"))


def make_catalogue(config_dir: Path | None = None) -> Catalogue:
    """Return the catalogue of eke's `conf/` and the user's folder."""
    return Catalogue((conf_folder(), *([config_dir] if config_dir else [])))


def title(group: str) -> str:
    """Return name and description of a group."""
    return f"{group}: {GROUPS[group][0] if group in GROUPS else group}"


def option_summaries(group: str, catalogue: Catalogue) -> dict[str, str]:
    """Return option -> its description, without the name: `optimizer=adamw -- description`."""
    heads = {option: headline(file) for option, file in catalogue.options.get(group, {}).items()}
    return {option: head.partition(" -- ")[2] or head for option, head in heads.items()}


def headline(file: Path) -> str:
    """Return the first comment line of an option's file after the package directive."""
    line = re.search(r"^#(?! @package)(.*)", file.read_text(), re.MULTILINE)
    return line[1].strip() if line else ""


def merge_swept_values(overrides: list[list[str]]) -> list[str]:
    """Merge overrides to a sweep: `data=hub data.name=imdb,squad`. Empty if keys differ."""
    keys = {(*words[:-1], words[-1].partition("=")[0]) for words in overrides if words}
    if len(keys) != 1 or not all(overrides):
        return []
    *first, key = keys.pop()
    values = dict.fromkeys(words[-1].partition("=")[2] for words in overrides)
    return [*first, f"{key}={','.join(values)}"]


def hydra_reason(error: BaseException) -> str:
    """Return the first line of an exception of Hydra or OmegaConf, without location."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and re.search(r"raised while composing config:$", lines[0]):
        lines = lines[1:]
    if error.__cause__ and (not lines or lines[0].startswith("Error merging")):
        return hydra_reason(error.__cause__)
    text = lines[0] if lines else type(error).__name__
    return re.sub(r"^In '[^']*': ", "", text)


def shown(text: str) -> str:
    """Format user text for a message: on one line, at most 60 characters."""
    printable = text if text.isprintable() else repr(text)[1:-1]
    return printable if len(printable) <= 60 else printable[:57] + "..."


# Placeholders for required texts, which have no default.
_PLACEHOLDER = "FILE_OR_FOLDER"
_PLACEHOLDERS = {
    "model.name_or_path": "FOLDER_OR_HUB_NAME",
    "data.name": "FOLDER_OR_HUB_NAME",
    "offload.path": "FOLDER",
}
# Node types with which OmegaConf validates values.
_NODES: dict[type, Any] = {bool: BooleanNode, int: IntegerNode, float: FloatNode, str: StringNode}


def is_interpolation(value: Any) -> bool:
    """Return whether the value is an interpolation, known after composition."""
    return isinstance(value, str) and "${" in value


def is_valid_value(field: Field, value: Any) -> bool:
    """Return whether a value is valid for this key after OmegaConf's conversion."""
    if field.kind is dict or value == "???":  # OmegaConf's sign of a missing value
        return isinstance(value, dict)
    with suppress(OmegaConfBaseException, ValueError, TypeError):
        if get_origin(field.kind) is list:
            ListConfig(value, element_type=get_args(field.kind)[0], is_optional=field.optional)
        elif issubclass(field.kind, Enum):
            EnumNode(field.kind, value, is_optional=field.optional)
        else:
            _NODES[field.kind](value, is_optional=field.optional)
        return True
    return False


def default_text(field: Field, key: str = "") -> str:
    """Return the schema's default as command-line text, or a placeholder."""
    if field.default == "???":
        is_target = key.endswith(".target")
        return "IMPORT_PATH" if is_target else _PLACEHOLDERS.get(key, _PLACEHOLDER)
    default = field.default
    return str(default.name) if isinstance(default, Enum) else format_value(default)


def suggest_value(field: Field, value: Any) -> str:
    """Return the nearest valid value as command-line text, or the default."""
    near: str | None = None
    if get_origin(field.kind) is list:
        near = f"[{value}]" if isinstance(value, str) else None
    elif issubclass(field.kind, Enum):
        members = list(field.kind.__members__)
        near = suggest_match(str(value), members)
        if isinstance(value, bool):  # a switch of several states
            wanted = ("on", *(m for m in members if m != "off")) if value else ("off",)
            near = next((member for member in wanted if member in members), None)
    elif field.kind is bool:
        words = {"true": "true", "false": "false", "enabled": "true", "disabled": "false"}
        near = words.get(suggest_match(str(value), words) or "")
    elif field.kind in (int, float) and not isinstance(value, bool):
        near = _leading_number(field.kind, str(value))
        if near and field.limit and not field.limit.admits(float(near)):
            near = None
    return near or default_text(field)


def _leading_number(kind: type, text: str) -> str | None:
    """Return the number that a text begins with: `4k` -> 4000. None without a number."""
    match = re.match(r"\s*([-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)\s*([kKM])?", text)
    number = float(match[1]) * {"k": 1e3, "K": 1e3, "M": 1e6}.get(match[2], 1) if match else None
    if number is None or math.isinf(number):
        return None
    return str(int(number)) if kind is int else f"{number:g}"
