"""Everything that can be typed: groups, options and key paths, read from `conf/` and the schema.

Small pieces of error messages: nearest names, shell quoting, Hydra's own words made short.

Is a value of the type its key wants, and if not, which value was probably meant?
"""

import dataclasses
import re
import shlex
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache, cached_property
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from omegaconf import BooleanNode, EnumNode, FloatNode, IntegerNode, ListConfig, StringNode
from omegaconf.errors import OmegaConfBaseException

from eke.common.paths import conf_folder, program
from eke.common.text import closest as closest
from eke.common.text import format_value
from eke.common.text import normal as normal
from eke.config.schema import VARIANTS, Config, Limit

GROUPS: dict[str, str] = {
    "model": "architecture and size",
    "task": "what it learns to predict",
    "data": "what it is trained on",
    "batch": "samples per step",
    "precision": "number formats",
    "optimizer": "update rule and its state",
    "schedule": "learning rate over steps",
    "memory": "activations kept or redone",
    "attention": "attention implementation",
    "compile": "torch.compile",
    "kernels": "fused operations",
    "distributed": "processes and sharding",
    "offload": "state off the device",
    "dataloader": "how batches arrive",
    "peft": "which weights are trained",
    "engine": "training loop",
    "tracker": "where results are shown",
    "hardware": "machine to plan for",
    "slurm": "cluster that runs (-m)",
    "recipe": "named set of techniques",
    "experiment": "named, complete setting",
    "sweep": "named set of runs (-m)",
}
"""What each group decides, in the order of the help page (a group that is not here comes last)."""

LABELS = ("model", "precision", "memory", "dataloader", "slurm")
"""Groups in which `option` only names a set of values: a user's file may have its own name."""

SECRET_FIX = "export NAME=...   (in the shell; or a file: slurm.setup=['export NAME=$(cat FILE)'])"
"""How to pass a secret without typing it as the value of a key."""

FIXED_FIELDS = ("option", "family")
"""Fields that only an option's own file sets."""

# Hydra's own groups and the schema's are no choices of eke's.
_NOT_GROUPS = ("hydra", "schema")


@dataclass(frozen=True)
class Field:
    """One key of one schema class."""

    annotation: type
    """The type as declared: `int | None`, an Enum class, ..."""
    default: Any
    """The schema's default; `None` where it has none."""
    limit: Limit | None = None
    """The numbers that make sense."""

    @property
    def optional(self) -> bool:
        """Whether null is a value of it."""
        return NoneType in get_args(self.annotation)

    @property
    def kind(self) -> type:
        """The type without `None`."""
        if get_origin(self.annotation) is dict:
            return dict
        kinds: list[type] = [arg for arg in get_args(self.annotation) if arg is not NoneType]
        return kinds[0] if isinstance(self.annotation, UnionType) else self.annotation

    def words(self) -> str:
        """What may be typed: `a whole number or null`, `one of auto, on, off`."""
        if get_origin(self.kind) is list:
            wanted = "a list, [a,b]"
        elif issubclass(self.kind, Enum):
            wanted = "one of " + ", ".join(self.kind.__members__)
        else:
            names = {
                bool: "true or false",
                int: "a whole number",
                float: "a number",
                str: "text",
                dict: "a mapping",
            }
            wanted = names[self.kind]
        return f"{wanted} or null" if self.optional else wanted


@dataclass(frozen=True)
class Catalogue:
    """The options found in the folders, and every key path of the schema."""

    folders: tuple[Path, ...]
    """Where options are looked for; the first that has one wins, as in Hydra's search path."""

    @cached_property
    def options(self) -> dict[str, dict[str, Path]]:
        """Group -> option -> its file; groups in the order of `GROUPS`."""
        found: dict[str, dict[str, Path]] = {group: {} for group in GROUPS}
        for folder in self.folders:
            for group in sorted(p for p in folder.iterdir() if p.is_dir()):
                if group.name in _NOT_GROUPS or group.name.startswith("."):
                    continue
                files = found.setdefault(group.name, {})
                for file in sorted(group.glob("*.yaml")):
                    files.setdefault(file.stem, file)
        return {group: files for group, files in found.items() if files}

    @cached_property
    def defaults(self) -> dict[str, str]:
        """Group -> the option that is taken when none is typed (from `config.yaml`)."""
        text = (self.folders[0] / "config.yaml").read_text()
        return dict(re.findall(r"^  - (\w+): (\w+)$", text, flags=re.MULTILINE))

    def without_effect(self, group: str) -> str:
        """The option that does nothing, else the default one."""
        options = self.options[group]
        return "none" if "none" in options else self.defaults.get(group, next(iter(options)))

    @cached_property
    def sections(self) -> dict[str, tuple[type, ...]]:
        """Section of the configuration -> the schema classes it may have."""
        hints: dict[str, type] = get_type_hints(Config)
        return {
            name: tuple(VARIANTS[name].values()) if VARIANTS.get(name) else (kind,)
            for name, kind in hints.items()
            if is_dataclass(kind)
        }

    @cached_property
    def keys(self) -> dict[str, Field]:
        """Every key path that some composition has, with its type."""
        keys = {
            f"{section}.{name}": found
            for section, classes in self.sections.items()
            for cls in reversed(classes)
            for name, found in class_fields(cls)
        }
        root = {n: f for n, f in class_fields(Config) if n not in self.sections}
        return {**keys, **root}

    def is_entry(self, key: str) -> bool:
        """Whether `key` lies in a mapping of free keys: `trainer.extra.debug`."""
        mapping, _, name = key.rpartition(".")
        return bool(name) and mapping in self.keys and self.keys[mapping].kind is dict

    def names(self, section: str) -> list[str]:
        """The keys of a section, without the section's name and without the fixed ones."""
        prefix = f"{section}."
        names = [key.removeprefix(prefix) for key in self.keys if key.startswith(prefix)]
        return [name for name in names if name not in FIXED_FIELDS]

    def schema_class(self, group: str, option: str) -> type:
        """The schema class an option's file names in its defaults list, or the option it builds on.

        The group's first class if neither is said.
        """
        seen: set[str] = set()
        while option in self.options[group] and option not in seen:
            seen.add(option)
            text = self.options[group][option].read_text()
            match = re.search(rf"/schema/{group}/(\w+)@_here_", text)
            if match and match[1] in VARIANTS[group]:
                return VARIANTS[group][match[1]]
            entry = rf"^\s*- *(?:/{group}/)?(?!_self_)(\w+)(?:@_here_)?\s*$"
            base = re.search(entry, text, flags=re.MULTILINE)
            option = base[1] if base else option
        return self.sections[group][0]

    def options_with(self, group: str, name: str) -> list[str]:
        """The options of a group that have the key `group.name`."""
        return [
            option
            for option in self.options.get(group, {})
            if name in dict(class_fields(self.schema_class(group, option)))
        ]


def class_fields(cls: type) -> tuple[tuple[str, Field], ...]:
    """Name and type of each field of a schema class."""
    return _class_fields(cls)


@cache  # on its own: mypy 2.4 takes classes of unhashable objects for unhashable
def _class_fields(cls: type) -> tuple[tuple[str, Field], ...]:
    hints = get_type_hints(cls)
    return tuple((item.name, _field(item, hints[item.name])) for item in fields(cls))


def _field(item: "dataclasses.Field[Any]", annotation: Any) -> Field:
    default = None if item.default is MISSING else item.default
    if item.default_factory is not MISSING and get_origin(annotation) in (dict, list):
        default = item.default_factory()
    return Field(annotation=annotation, default=default, limit=item.metadata.get("limit"))


def make_catalogue(config_dir: Path | None = None) -> Catalogue:
    """The catalogue of eke's own `conf/`, and of the user's folder behind it."""
    return Catalogue((conf_folder(), *([config_dir] if config_dir else [])))


def headline(file: Path) -> str:
    """What an option says about itself: its first comment line after the package directive."""
    for line in file.read_text().splitlines():
        if line.startswith("#") and not line.startswith("# @package"):
            return line.removeprefix("#").strip()
    return ""


def multirun() -> str:
    """How a sweep is started."""
    return f"{program()} -m"


def as_typed(*overrides: str) -> str:
    """Overrides as they have to be typed in a shell."""
    return shlex.join(overrides)


def swept(overrides: list[list[str]]) -> list[str]:
    """`data=hub data.name=imdb,squad` from the overrides of each value; empty where they differ."""
    keys = {(*words[:-1], words[-1].partition("=")[0]) for words in overrides if words}
    if len(keys) != 1 or not all(overrides):
        return []
    *first, key = keys.pop()
    values = dict.fromkeys(words[-1].partition("=")[2] for words in overrides)
    return [*first, f"{key}={','.join(values)}"]


def quoted(value: str) -> str:
    """A value that Hydra's grammar takes as one text, whatever it holds."""
    escaped = re.sub(r'(\\*)"', lambda match: match[1] * 2 + '\\"', value)
    # A backslash before the closing quote would escape it.
    tail = len(escaped) - len(escaped.rstrip("\\"))
    return f'"{escaped}{chr(92) * tail}"'


def first_line(error: BaseException) -> str:
    """What a library's exception says, without its location prefix and its stack of details."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and re.search(r"raised while composing config:$", lines[0]):
        lines = lines[1:]
    if error.__cause__ and (not lines or lines[0].startswith("Error merging")):
        return first_line(error.__cause__)
    text = lines[0] if lines else type(error).__name__
    return re.sub(r"^In '[^']*': ", "", text)


def shown(text: str) -> str:
    """User's text inside a sentence: visible when blank, short when long, on one line."""
    printable = text if text.isprintable() else repr(text)[1:-1]
    return printable if len(printable) <= 60 else printable[:57] + "..."


# A placeholder that shows what belongs there; only mandatory texts have no default.
_PLACEHOLDER = "FILE_OR_FOLDER"
_PLACEHOLDERS = {
    "model.name_or_path": "FOLDER_OR_HUB_NAME",
    "data.name": "FOLDER_OR_HUB_NAME",
    "offload.path": "FOLDER",
}
# What OmegaConf itself checks values with.
_NODES: dict[type, Any] = {
    bool: BooleanNode,
    int: IntegerNode,
    float: FloatNode,
    str: StringNode,
}


def is_interpolation(value: Any) -> bool:
    """Whether the value is known only when the whole configuration is."""
    return isinstance(value, str) and "${" in value


def admits(field: Field, value: Any) -> bool:
    """Whether the configuration would take `value` for this key, converting as OmegaConf does."""
    if value == "???":  # OmegaConf's mark of a missing value
        return False
    try:
        if field.kind is dict:
            return isinstance(value, dict)
        if get_origin(field.kind) is list:
            ListConfig(value, element_type=get_args(field.kind)[0], is_optional=field.optional)
        elif issubclass(field.kind, Enum):
            EnumNode(field.kind, value, is_optional=field.optional)
        else:
            _NODES[field.kind](value, is_optional=field.optional)
    except (OmegaConfBaseException, ValueError, TypeError):
        return False
    return True


def default_text(field: Field, key: str = "") -> str:
    """The schema's default as it is typed; what belongs there, by the key path, if it has none."""
    if field.default == "???":
        return _PLACEHOLDERS.get(key, _PLACEHOLDER)
    default = field.default
    return str(default.name) if isinstance(default, Enum) else format_value(default)


def probably_meant(field: Field, value: Any) -> str:
    """The right value nearest to a wrong one, as it is typed; the default when nothing is near."""
    return _nearest(field, value) or default_text(field)


def _nearest(field: Field, value: Any) -> str | None:
    if get_origin(field.kind) is list:
        return f"[{value}]" if isinstance(value, str) else None
    if issubclass(field.kind, Enum):
        return _nearest_member(list(field.kind.__members__), value)
    if field.kind is bool:
        words = {"true": "true", "false": "false", "enabled": "true", "disabled": "false"}
        near = closest(str(value), words)
        return words[near] if near else None
    if field.kind in (int, float) and not isinstance(value, bool):
        number = _leading_number(field.kind, str(value))
        sensible = number and (field.limit is None or field.limit.admits(float(number)))
        return number if sensible else None
    return None


def _nearest_member(members: list[str], value: Any) -> str | None:
    """`true` and `false` mean on and off where there are such members."""
    if isinstance(value, bool):
        if not value:
            return "off" if "off" in members else None
        return "on" if "on" in members else next(m for m in members if m != "off")
    return closest(str(value), members)


def _leading_number(kind: type, text: str) -> str | None:
    """`8 samples` -> 8, `1000.0` -> 1000, `4k` -> 4000; None without a number in front."""
    match = re.match(r"\s*([-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)\s*([kKM])?", text)
    if not match:
        return None
    number = float(match[1]) * {"k": 1e3, "K": 1e3, "M": 1e6}.get(match[2], 1)
    if abs(number) == float("inf"):
        return None
    return str(int(number)) if kind is int else f"{number:g}"
