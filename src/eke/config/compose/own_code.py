"""The user's own code by import path: checks of its keys, and Hydra's spelling in option files."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from omegaconf import OmegaConf

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.text import format_value, override, quoted
from eke.config.compose.catalogue import (
    Catalogue,
    class_fields,
    is_valid_value,
    shown,
    suggest_value,
)
from eke.config.compose.hydra_spelling import HYDRAS, converted
from eke.config.parts import OWN, PATH_KEYS, is_path, normalized
from eke.config.schema import ENTRIES, VARIANTS, Config
from eke.config.schema.fields import field_docs

_NAME = r"[^\W\d]\w*"
_PATH = re.compile(rf"{_NAME}(\.{_NAME})*(\.{_NAME}|:{_NAME}(\.{_NAME})*)")


class _OptionFiles(FileConfigSource):
    """Folder of option files, in which Hydra's `_target_` is converted before the composition."""

    @staticmethod
    def scheme() -> str:
        return "eke"

    def load_config(self, config_path: str) -> ConfigResult:
        found = super().load_config(config_path)
        file = Path(self.path, config_path).with_suffix(".yaml")
        content, wrong = converted(file, found.config)
        if wrong:
            raise ConfigError([Problem(*each, "wrong_file") for each in wrong])
        found.config = OmegaConf.create(content)
        return found


def search_path(folder: Path) -> str:
    """Return the setting of Hydra that adds a folder with the user's options."""
    Plugins.instance().register(_OptionFiles)
    return f"hydra.searchpath=[{quoted(f'eke://{folder}')}]"


def typed_config(found: Config) -> tuple[Config, list[Problem]]:
    """Return a composed configuration with typed entries and normal paths, and the problems."""
    problems, values = [], {f.name: getattr(found, f.name) for f in dataclasses.fields(Config)}
    for group, cls in ENTRIES.items():
        values[group] = {}
        for name, raw in getattr(found, group).items():
            problems += (wrong := list(_entry_problems(f"{group}.{name}", raw, cls)))
            values[group][str(name)] = cls() if wrong else _typed(raw, cls)
    config = Config(**values)
    if not problems:
        problems = list(_part_problems(config))
    return config, problems


def _typed(raw: Mapping[str, Any], cls: type) -> Any:
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(cls), dict(raw)))


def _entry_problems(key: str, raw: Any, cls: type) -> Iterator[Problem]:
    known = dict(class_fields(cls))
    if not isinstance(raw, dict):
        fix = Fix(f"{key}.target={raw if isinstance(raw, str) else 'IMPORT_PATH'}")
        yield Problem(key, shown(format_value(raw)), "needs target", fix, "own_code")
        return
    for name, value in raw.items():
        if name not in known:
            yield _as_argument(f"{key}.{name}", format_value(value), key)
        elif not is_valid_value(known[name], value) and value != "???":
            fix = Fix(f"{key}.{name}={suggest_value(known[name], value)}")
            why = f"must be {known[name].words()}"
            yield Problem(f"{key}.{name}", shown(format_value(value)), why, fix, "wrong_type")
    if raw.get("target", "???") == "???" and raw.keys() <= known.keys():
        fix = Fix(f"{key}.target=IMPORT_PATH")
        yield Problem(f"{key}.target", "", f"{key} needs a value", fix, "missing_value")


def _part_problems(config: Config) -> Iterator[Problem]:
    """Yield problems of paths and arguments, and normalise the paths in place."""
    sections = {group: getattr(config, group) for group in OWN}
    parts = {group: each for group, each in sections.items() if hasattr(each, "target")}
    for group in ENTRIES:
        parts |= {f"{group}.{name}": each for name, each in getattr(config, group).items()}
    paths = [(key, each, "target") for key, each in parts.items()]
    paths += [
        (g, sections[g], name)
        for g, name in PATH_KEYS
        if is_path(getattr(sections[g], name, None) or "")
    ]
    for key, section, name in paths:
        path = getattr(section, name)
        if path is None or (name == "per" and not is_path(path)):
            continue
        if problem := wrong_target(f"{key}.{name}", path):
            yield problem
        setattr(section, name, normalized(path))
    for key, section in parts.items():
        for name in ("args", "eval_args", "inputs"):
            yield from _wrong_values(f"{key}.{name}", getattr(section, name, {}))
        cls: Any = type(section)
        fields = dict(class_fields(cls))
        for name, doc in field_docs(cls).items():
            default = fields[name].default
            if doc.startswith("Filled in") and getattr(section, name) != default:
                value = format_value(getattr(section, name))
                yield _as_argument(f"{key}.{name}", value, key)


def wrong_target(key: str, text: str) -> Problem | None:
    """Return the problem of a text that is no import path, with what to write instead."""
    if _PATH.fullmatch(text):
        return None
    why, fix = "is not an import path: package.module.Name", Fix()
    file, _, name = text.partition(":")
    module = re.sub(r"^(\.{1,2}/)*(src/)?|\.py$", "", file).replace("/", ".")
    if not re.fullmatch(rf"{_NAME}(\.{_NAME})*", module):
        module = re.sub(r"\W", "", Path(file).stem) if "/" in file else ""
    if re.match(r"lambda\b", text) or not module:
        fix = Fix(remark=f"write a function into a file NAME.py: {key}=NAME.FUNCTION")
    elif name.isidentifier():
        fix = Fix(f"{key}={module}.{name}")
    else:
        why = "needs the name of a class or function in the module"
        fix = Fix(remark=f"{key}={module}.NAME, where NAME is in {module}")
    return Problem(key, shown(text), why, fix, "own_code")


def as_target(group: str, text: str) -> Fix:
    """Return overrides for an import path in place of an option, an empty fix for other texts."""
    is_file = group in ("model", "data") and not re.search(r"[.:][A-Z]\w*$", text)
    if is_file or not _PATH.fullmatch(text):
        return Fix()
    if group in ENTRIES:
        return Fix(f"{group}.{re.split('[.:]', text)[-1].lower()}.target={text}")
    return Fix(f"{group}=custom", f"{group}.target={text}") if group in OWN else Fix()


def _wrong_values(key: str, value: Any) -> Iterator[Problem]:
    """Yield problems of arguments that JSON cannot store, or that Hydra would interpret."""
    if isinstance(value, dict):
        for name, item in value.items():
            path = f"{key}.{name}"
            if name in HYDRAS:
                why = "arguments are plain values. Build objects in your own class or function"
                yield Problem(path, shown(format_value(item)), why, id="own_code")
            elif not isinstance(name, str):
                yield Problem(path, "", "names of arguments must be texts", id="own_code")
            else:
                yield from _wrong_values(path, item)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _wrong_values(f"{key}.{number}", item)
    elif isinstance(value, float) and not math.isfinite(value):
        fix = Fix(override(key, str(value)))
        yield Problem(key, str(value), "must be a finite number, or a text", fix, "own_code")
    elif not isinstance(value, bool | int | float | str | None):
        yield Problem(key, shown(str(value)), "must be a plain value", id="own_code")


def is_own(group: str, option: str, catalogue: Catalogue) -> bool:
    """Return whether an option names the user's own code."""
    return group in OWN and catalogue.schema_class(group, option) is VARIANTS[group]["custom"]


def as_argument(text: str, chosen: bool = True) -> Problem:
    """Return the problem of an override without `args`. `chosen`: its group has own code."""
    key, _, raw = text.lstrip("+").partition("=")
    group = key.partition(".")[0]
    problem = _as_argument(key, raw, group)
    fix = Fix(*([] if chosen else [f"{group}=custom"]), *problem.fix.words)
    return dataclasses.replace(problem, fix=fix)


def _as_argument(key: str, raw: str, part: str) -> Problem:
    name = key.removeprefix(f"{part}.")
    if name == "_target_":
        why, fix = "is Hydra's name of target in option files", Fix(f"{part}.target={raw}")
        return Problem(key, shown(raw), why, fix, "own_code")
    why = f"arguments of your own code are {part}.args.NAME"
    fix = Fix() if name in HYDRAS else Fix(f"{part}.args.{name}={raw}")
    return Problem(key, shown(raw), why, fix, "own_code")


def redirected(
    problems: Sequence[Problem], texts: Sequence[str], catalogue: Catalogue
) -> list[Problem]:
    """Return the problems, with unknown keys of groups with own code as its arguments."""
    chosen = dict[str, str]()
    for text in texts:
        group, _, option = text.lstrip("+").partition("=")
        if group == "experiment" and option in catalogue.options[group]:
            found = "\n".join(catalogue.texts(group, option))
            chosen |= dict(re.findall(r"override\s+/?(\w+)\s*:\s*(\w+)", found)) | chosen
        elif group in OWN:
            chosen[group] = option
    own = {g for g, os in chosen.items() if all(is_own(g, o, catalogue) for o in os.split(","))}
    typed = {text.lstrip("+").partition("=")[0]: text for text in texts}
    keys = {p.key for p in problems if p.key.partition(".")[0] in own and p.id in _UNKNOWN}
    keys = {key for key in keys & typed.keys() if key not in catalogue.keys}
    swapped = {key: as_argument(typed[key]) for key in keys}
    return list(dict.fromkeys(swapped.get(problem.key, problem) for problem in problems))


_UNKNOWN = ("unknown_key", "foreign_name", "own_code")
