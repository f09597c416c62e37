"""Cache of composed trees. Hydra needs 0.1 to 0.3 s per tree. Most can be derived faster.

- Values (`optimizer.lr=0.1`) are set last, as in Hydra, on a copy of a tree with the same options.
- Sections whose options write into no other section are joined from cached trees with the same
  presets. Hydra composes a missing section separately if no preset writes into it.
"""

import os
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import filterfalse, starmap
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, flag_override, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.paths import conf_folder
from eke.config.compose.catalogue import Catalogue, make_catalogue
from eke.config.compose.check_overrides import parse
from eke.config.compose.own_code import search_path
from eke.config.schema import register

PRESETS = ("recipe", "experiment", "sweep")
"""Groups whose files may write into any section."""

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C loader is ten times as fast
_SCHEMA = re.compile(r"/schema/\w+/\w+@_here_")
_OPTION = re.compile(r"(?:/(?P<group>\w+)/)?(?P<option>[\w.-]+)(?P<here>@_here_)?")


def is_self_contained(group: str, option: str, catalogue: Catalogue) -> bool:
    """Return whether an option only writes into its own section. False if uncertain."""
    file = catalogue.options.get(group, {}).get(option)
    if file is None:
        return False
    text = file.read_text()
    is_preset = group in PRESETS
    # https://hydra.cc/docs/advanced/overriding_packages/: writes outside the section
    if not is_preset and re.search(r"^#\s*@package", text, flags=re.MULTILINE):
        return False
    entries = (yaml.load(text, _LOADER) or {}).get("defaults") or []
    return all(_writes_own_section(entry, group, is_preset, catalogue) for entry in entries)


def _writes_own_section(entry: Any, group: str, is_preset: bool, catalogue: Catalogue) -> bool:
    """Return whether an entry of a defaults list only writes into its own section."""
    if isinstance(entry, dict):
        words = " ".join(map(str, [*entry.keys(), *entry.values()]))
        return is_preset and words.startswith("override /") and "$" not in words
    if entry == "_self_" or _SCHEMA.fullmatch(str(entry)):
        return True
    match = _OPTION.fullmatch(str(entry))
    if not match or (match["group"] and not match["here"] and not is_preset):
        return False  # `/model/tiny` without `@_here_` is placed below the section
    return is_self_contained(match["group"] or group, match["option"], catalogue)


def set_by_preset(group: str, option: str, catalogue: Catalogue) -> Iterator[str]:
    """Yield the keys set by a preset's file and its bases."""
    file = catalogue.options.get(group, {}).get(option)
    content: dict[str, Any] = (yaml.load(file.read_text(), _LOADER) or {}) if file else {}
    for entry in content.pop("defaults", None) or []:
        if isinstance(entry, Mapping):  # `override /precision: bf16`
            names = [str(key).removeprefix("override ").lstrip("/") for key in entry]
            yield from (name for name in names if name not in PRESETS)
            continue
        other, _, base = str(entry).lstrip("/").rpartition("/")  # `/experiment/small`, `small`
        if (other or group) in PRESETS:
            yield from set_by_preset(other or group, base, catalogue)
    yield from _paths(content)


def _paths(content: Mapping[str, Any], above: Iterable[str] = ()) -> Iterator[str]:
    for key, value in content.items():
        path = (*above, str(key))
        if isinstance(value, Mapping):
            yield from _paths(value, path)
        else:
            yield ".".join(path)


_MAX_KEPT = 256
"""Maximum number of cached trees, about 100 kB each."""


@dataclass(frozen=True)
class ComposedTree:
    """Composed configuration without schema types and without Hydra's section."""

    config: DictConfig
    choices: dict[str, str]
    """Group -> option."""


def hydra_base() -> dict[str, str]:
    """Return the argument `version_base` if Hydra needs it: 1.3 warns without, 1.4 with it."""
    return {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}


@contextmanager
def hydra_state() -> Iterator[None]:
    """Set up and restore Hydra's global state. ConfigError without a current folder."""
    try:
        os.getcwd()
    except OSError as error:
        why, fix = f"the current folder cannot be used: {error.strerror}", Fix(remark="cd FOLDER")
        raise ConfigError(Problem("PWD", "", why, fix, "missing_folder")) from error
    register()
    before = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf_folder()), job_name="eke", **hydra_base()):
            yield
    finally:
        GlobalHydra.instance().hydra = before


class RejectedValues(Exception):
    """Values that the tree rejects, with OmegaConf's errors."""

    def __init__(self, errors: Mapping[str, Exception], choices: Mapping[str, str]) -> None:
        super().__init__(*errors)
        self.errors = errors
        self.choices = choices


@dataclass(frozen=True)
class _Kept:
    """Tree without value overrides, composed by Hydra or joined from other trees."""

    content: bytes
    choices: dict[str, str]
    shared: tuple[str, ...]
    """Overrides that may change any section: presets and settings of Hydra."""
    typed: dict[str, str]
    """Group -> option, from the other overrides."""


class ComposeCache:
    """Composes similar trees and reuses their common parts."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self._kept: dict[tuple[str, ...], _Kept] = {}
        self._sections = catalogue.sections.keys() - PRESETS
        self._stands_alone = cache(partial(is_self_contained, catalogue=catalogue))
        self.num_composed = 0
        """Number of entire trees composed by Hydra."""

    def tree(self, overrides: Sequence[str]) -> ComposedTree:
        """Compose a tree inside `hydra_state`. NotSet for values that the options reject."""
        options = tuple(filter(self.chooses, overrides))
        kept = self._kept.pop(options, None) or self._joined(options) or self._composed(options)
        self._kept[options] = kept  # the newest is the last
        if len(self._kept) > _MAX_KEPT:
            del self._kept[next(iter(self._kept))]
        config: DictConfig = pickle.loads(kept.content)  # pickled by this process
        errors: dict[str, Exception] = {}
        for text in filterfalse(self.chooses, overrides):
            new = self._parsed(text)
            key, add = new.key_or_group, new.is_force_add()
            try:  # as Hydra does
                OmegaConf.update(config, key, new.value(), merge=True, force_add=add)
            except (OmegaConfBaseException, ValueError) as error:
                errors[text] = error
        if errors:
            raise RejectedValues(errors, kept.choices)
        return ComposedTree(config, kept.choices)

    def chooses(self, text: str) -> bool:
        """Return whether composition depends on this override: an option or setting of Hydra."""
        key = self._parsed(text).key_or_group
        return key in self.catalogue.options or key.startswith("hydra")

    def _parsed(self, text: str) -> Override:
        return parse(to_hydra_override(text, self.catalogue))

    def _composed(self, options: tuple[str, ...]) -> _Kept:
        self.num_composed += 1
        texts = [to_hydra_override(text, self.catalogue) for text in options]
        if folder := self.catalogue.own_folder:
            texts.append(search_path(folder))
        tree = hydra_compose("config", texts, return_hydra_config=True)
        chosen = {str(g): str(o) for g, o in tree.hydra.runtime.choices.items()}
        choices = {g: o for g, o in chosen.items() if not g.startswith("hydra/")}
        with read_write(tree), open_dict(tree):
            del tree["hydra"]
        return _Kept(pickle.dumps(tree), choices, *self._split(options))

    def _split(self, options: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
        """Split overrides into those that may change any section, and group -> option."""
        shared, typed = [], {}
        for text in options:
            override = self._parsed(text)
            key = override.key_or_group
            if key in self._sections and key not in typed:
                typed[key] = str(override.value())
            else:
                shared.append(text)
        if {f"{name}={self.catalogue.defaults[name]}" for name in PRESETS}.issuperset(shared):
            shared = []  # only defaults such as `recipe=none`, which may undo an experiment's
        return tuple(shared), typed

    def _joined(self, options: tuple[str, ...]) -> _Kept | None:
        """Join a tree from sections of cached trees. Return None if a section is missing."""
        shared, typed = self._split(options)
        related = [kept for kept in self._kept.values() if kept.shared == shared]
        missing = typed.items() - {choice for kept in related for choice in kept.choices.items()}
        if missing and not (related and self._composes_alone(missing, related[0].choices)):
            return None  # before the slow check below, which reads the options' files
        related = [k for k in related if all(starmap(self._stands_alone, k.choices.items()))]
        sources = {choice: kept for kept in related for choice in kept.choices.items()}
        defaults = {g: o for k in related for g, o in k.choices.items() if g not in k.typed}
        wanted = {g: o for g, o in (defaults | typed).items() if g in self._sections}
        groups = {group for group, _ in sources if group in self._sections}
        if not related or wanted.keys() != groups or not sources.keys() | missing >= wanted.items():
            return None
        base = max(related, key=lambda kept: len(kept.choices.items() & wanted.items()))
        config: DictConfig = pickle.loads(base.content)
        absent = [f"+{group}={option}" for group, option in missing]
        made = hydra_compose("schema", overrides=absent) if missing else DictConfig({})
        with flag_override(config, ["struct", "readonly"], [False, False]):
            for group, option in wanted.items() - base.choices.items():
                source = sources.get((group, option))
                tree = pickle.loads(source.content) if source else made
                config[group] = tree._get_node(group)
        return _Kept(pickle.dumps(config), base.choices | wanted, shared, typed)

    def _composes_alone(self, missing: Set[tuple[str, str]], choices: Mapping[str, str]) -> bool:
        """Return whether only these options write into their sections."""
        presets = [(group, choices[group]) for group in PRESETS]
        paths = [p for each in presets for p in set_by_preset(*each, self.catalogue) if "." in p]
        free = dict(missing).keys().isdisjoint(path.partition(".")[0] for path in paths)
        return free and not self.catalogue.own_folder and all(starmap(self._stands_alone, missing))


def make_trees(catalogue: Catalogue) -> ComposeCache:
    """Return `ComposeCache` for one composition. Only user files may change before the next one."""
    return ComposeCache(catalogue) if catalogue.own_folder else _own_trees(conf_folder())


@lru_cache(maxsize=1)
def _own_trees(_conf: Path) -> ComposeCache:
    return ComposeCache(make_catalogue())


def to_hydra_override(text: str, catalogue: Catalogue) -> str:
    """Convert an override to a form that Hydra accepts, e.g. `++precision=bf16`."""
    key, equals, value = text.lstrip("+").partition("=")
    mapping = key in catalogue.keys and catalogue.keys[key].kind is dict and "." in key
    if mapping or catalogue.is_entry(key):
        return f"++{key}{equals}{value}"
    return text.removeprefix("++") if key in catalogue.options else text
