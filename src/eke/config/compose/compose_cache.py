"""Composed trees. Hydra composes one in 0.1 to 0.3 s; most can do with less.

- Values (`optimizer.lr=0.1`) are set on a copy of a tree with the same options, as Hydra does last.
- A section depends on its own group's option and on the presets, on nothing else. So when each of
  some options has been seen in a tree with the same presets, a tree with all of them is joined from
  those sections. What takes part in it stands alone (`eke.config.compose.compose_cache`);
  else Hydra composes.

What is refused on the way, Hydra composes as a whole and says why: its words are the user's.

Which option files write into their own section only, beside whatever else is chosen.
"""

import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, flag_override, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from eke.common.paths import conf_folder
from eke.config.compose.catalogue import Catalogue, make_catalogue, quoted
from eke.config.compose.hydra_settings import is_hydras
from eke.config.compose.overrides import parse
from eke.config.schema import register

PRESETS = ("recipe", "experiment", "sweep")
"""Groups whose files may write anywhere."""

_SCHEMA = re.compile(r"/schema/\w+/\w+@_here_")
_OPTION = re.compile(r"(?:/(?P<group>\w+)/)?(?P<option>[\w.-]+)(?P<here>@_here_)?")


def stands_alone(group: str, option: str, catalogue: Catalogue) -> bool:
    """Whether what an option does follows from itself, not from options of other groups.

    A preset may write anywhere: it does so if its defaults list is the same beside any options.
    Any other file must write into its own section only. Whatever is not surely so, is not.
    """
    file = catalogue.options.get(group, {}).get(option)
    if file is None:
        return False
    text = file.read_text()
    is_preset = group in PRESETS
    # https://hydra.cc/docs/advanced/overriding_packages/: elsewhere than in the group's section
    if not is_preset and re.search(r"^#\s*@package", text, flags=re.MULTILINE):
        return False
    content = yaml.safe_load(text) or {}
    entries = content.get("defaults") or []
    return all(_is_alone(entry, group, is_preset, catalogue) for entry in entries)


def _is_alone(entry: Any, group: str, is_preset: bool, catalogue: Catalogue) -> bool:
    """One entry of a defaults list: itself, a schema, an option to start from, or an override."""
    if isinstance(entry, dict):
        words = " ".join(map(str, [*entry.keys(), *entry.values()]))
        return is_preset and words.startswith("override /") and "$" not in words
    if entry == "_self_" or _SCHEMA.fullmatch(str(entry)):
        return True
    match = _OPTION.fullmatch(str(entry))
    if not match or (match["group"] and not match["here"] and not is_preset):
        return False  # `/model/tiny` without `@_here_` goes below the section
    return stands_alone(match["group"] or group, match["option"], catalogue)


def set_by_preset(group: str, option: str, catalogue: Catalogue) -> Iterator[str]:
    """What a preset's file sets, and the presets that it starts from."""
    file = catalogue.options.get(group, {}).get(option)
    if file is None:
        return
    content: dict[str, Any] = yaml.safe_load(file.read_text()) or {}
    for entry in content.pop("defaults", None) or []:
        yield from _of_entry(entry, group, catalogue)
    yield from _paths(content)


def _of_entry(entry: Any, group: str, catalogue: Catalogue) -> Iterator[str]:
    """One entry of a defaults list: `override /precision: bf16`, `/experiment/small`, `small`."""
    if isinstance(entry, Mapping):
        for key in entry:
            name = str(key).removeprefix("override ").lstrip("/")
            if name not in PRESETS:
                yield name
        return
    other, _, option = str(entry).lstrip("/").rpartition("/")
    if (other or group) in PRESETS:
        yield from set_by_preset(other or group, option, catalogue)


def _paths(content: Mapping[str, Any], above: Iterable[str] = ()) -> Iterator[str]:
    """The key path of every value."""
    for key, value in content.items():
        path = (*above, str(key))
        if isinstance(value, Mapping):
            yield from _paths(value, path)
        else:
            yield ".".join(path)


MAX_KEPT = 256
"""Trees of different options that are kept; one has about 100 kB."""
MAX_FAMILIES = 32
"""Presets, and sets of them, whose sections are kept."""


@dataclass(frozen=True)
class Tree:
    """A composed configuration before it is typed, without Hydra's own part."""

    config: DictConfig
    choices: dict[str, str]
    """Group -> option."""
    of_hydra: tuple[str, ...] = ()
    """Settings of Hydra's own that presets change, by path."""


@contextmanager
def hydra_state() -> Iterator[None]:
    """Hydra's global state set up, and put back as it was."""
    if "schema.yaml" not in ConfigStore.instance().repo:
        register()
    before = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf_folder()), version_base="1.3", job_name="eke"):
            yield
    finally:
        GlobalHydra.instance().hydra = before


def without_hydra(tree: DictConfig) -> Tree:
    """Hydra's part taken out of a tree."""
    chosen = tree.hydra.runtime.choices
    choices = {str(g): str(o) for g, o in chosen.items() if not str(g).startswith("hydra/")}
    with read_write(tree), open_dict(tree):
        del tree["hydra"]
    return Tree(tree, choices)


class NotSet(Exception):
    """Values that the tree does not take."""

    def __init__(self, texts: list[str], choices: dict[str, str]) -> None:
        super().__init__(" ".join(texts))
        self.texts = texts
        self.choices = choices


@dataclass(frozen=True)
class _Kept:
    """A tree without values, as Hydra composed it or joined from such."""

    content: bytes
    choices: dict[str, str]
    of_hydra: tuple[str, ...]


@dataclass
class _Family:
    """Trees with the same presets."""

    new: list[tuple[_Kept, frozenset[str]]] = field(default_factory=list)
    """Composed and not looked into yet, with the groups that were typed."""
    seen: set[tuple[str, str]] = field(default_factory=set)
    """Group and option of every tree, whether looked into or not."""
    base: _Kept | None = None
    untyped: dict[str, str] = field(default_factory=dict)
    """Group -> its option where none is typed."""
    sources: dict[tuple[str, str], _Kept] = field(default_factory=dict)
    """Group and option -> a tree that has it."""
    sections: dict[tuple[str, str], DictConfig] = field(default_factory=dict)
    """The same, taken out of that tree when it was first needed."""

    def section(self, group: str, option: str) -> object:
        """The section that this option makes beside these presets."""
        key = (group, option)
        if key not in self.sections:
            tree = pickle.loads(self.sources[key].content)
            self.sections[key] = OmegaConf.masked_copy(tree, [group])
        return self.sections[key]._get_node(group)


class Trees:
    """Trees that have much in common; what they share is composed once."""

    def __init__(self, catalogue: Catalogue, config_dir: Path | None) -> None:
        self._catalogue = catalogue
        self._config_dir = config_dir
        self._kept: dict[tuple[str, ...], _Kept] = {}
        self._families: dict[tuple[str, ...], _Family] = {}
        self._alone: dict[tuple[str, str], bool] = {}
        self.num_composed = 0
        """How often Hydra has composed."""

    def tree(self, overrides: Sequence[str]) -> Tree:
        """The tree of these overrides, inside `hydra_state`.

        Raises:
            NotSet: values that the options' sections do not take.
            Exception: whatever Hydra raises while it composes the options.
        """
        parsed = [(text, self._parsed(text)) for text in overrides]
        options = tuple(text for text, override in parsed if self._is_choice(override))
        kept = self._with_options(options)
        config: DictConfig = pickle.loads(kept.content)  # pickled in this process
        values = [(text, override) for text, override in parsed if not self._is_choice(override)]
        refused = [text for text, override in values if not _set(config, override)]
        if refused:
            raise NotSet(refused, kept.choices)
        return Tree(config, kept.choices, kept.of_hydra)

    def tree_as_hydra(self, overrides: Sequence[str]) -> Tree:
        """The same; what cannot be composed raises what Hydra's own composition raises."""
        try:
            return self.tree(overrides)
        except (NotSet, HydraException):
            return self._by_hydra(overrides)

    def chooses(self, text: str) -> bool:
        """Whether Hydra has to know it to compose: an option, or a setting of Hydra's own."""
        return self._is_choice(self._parsed(text))

    def _parsed(self, text: str) -> Override:
        return parse(as_hydra_takes_it(text, self._catalogue))

    def _is_choice(self, override: Override) -> bool:
        key = override.key_or_group
        return key in self._catalogue.options or key.startswith("hydra")

    def _by_hydra(self, overrides: Sequence[str]) -> Tree:
        self.num_composed += 1
        texts = [as_hydra_takes_it(text, self._catalogue) for text in overrides]
        if self._config_dir:
            texts.append(f"hydra.searchpath=[{quoted(str(self._config_dir))}]")
        tree = without_hydra(hydra_compose("config", texts, return_hydra_config=True))
        chosen = [(group, tree.choices.get(group, "")) for group in PRESETS]
        paths = [p for each in chosen for p in set_by_preset(*each, self._catalogue)]
        return replace(tree, of_hydra=tuple(path for path in paths if is_hydras(path)))

    def _with_options(self, options: tuple[str, ...]) -> _Kept:
        kept = self._kept.pop(options, None) or self._joined(options) or self._composed(options)
        self._kept[options] = kept  # the newest is the last
        if len(self._kept) > MAX_KEPT:
            del self._kept[next(iter(self._kept))]
        return kept

    def _composed(self, options: tuple[str, ...]) -> _Kept:
        tree = self._by_hydra(options)
        kept = _Kept(pickle.dumps(tree.config), tree.choices, tree.of_hydra)
        shared, typed = self._split(options)
        family = self._families.pop(shared, None) or _Family()
        self._families[shared] = family
        if len(self._families) > MAX_FAMILIES:
            del self._families[next(iter(self._families))]
        family.new.append((kept, frozenset(typed)))
        family.seen.update(kept.choices.items())
        return kept

    def _split(self, options: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
        """What may change any section, and what is typed for the others: group -> option."""
        shared, typed = [], {}
        for text in options:
            override = self._parsed(text)
            key = override.key_or_group
            if self._has_section(key) and key not in typed:
                typed[key] = str(override.value())
            else:
                shared.append(text)
        return tuple(shared), typed

    def _has_section(self, group: str) -> bool:
        return group in self._catalogue.sections and group not in PRESETS

    def _joined(self, options: tuple[str, ...]) -> _Kept | None:
        """A tree of sections that Hydra has composed in others; None if one of them is missing."""
        shared, typed = self._split(options)
        family = self._families.get(shared)
        if family is None or not family.seen >= typed.items():
            return None
        self._look_into(family)
        base = family.base
        wanted = {**family.untyped, **typed}
        if base is None or not family.sources.keys() >= wanted.items():
            return None
        if any(self._has_section(group) and group not in wanted for group in base.choices):
            return None
        config: DictConfig = pickle.loads(base.content)
        with flag_override(config, ["struct", "readonly"], [False, False]):
            for group, option in wanted.items():
                if base.choices[group] != option:
                    config[group] = family.section(group, option)
        return _Kept(pickle.dumps(config), {**base.choices, **wanted}, base.of_hydra)

    def _stands_alone(self, choice: tuple[str, str]) -> bool:
        if choice not in self._alone:
            self._alone[choice] = stands_alone(*choice, self._catalogue)
        return self._alone[choice]

    def _look_into(self, family: _Family) -> None:
        """Which sections new trees have: not sooner, since most programs compose one."""
        for kept, typed in family.new:
            if not all(map(self._stands_alone, kept.choices.items())):
                continue
            family.base = family.base or kept
            for group, option in kept.choices.items():
                if self._has_section(group):
                    family.sources.setdefault((group, option), kept)
                    if group not in typed:
                        family.untyped[group] = option
        family.new.clear()


def make_trees(catalogue: Catalogue, config_dir: Path | None) -> Trees:
    """Trees for one composition. A user's own files may change until the next; eke's do not."""
    return Trees(catalogue, config_dir) if config_dir else _own_trees(conf_folder())


@lru_cache(maxsize=1)
def _own_trees(_conf: Path) -> Trees:
    return Trees(make_catalogue(), None)


def _set(config: DictConfig, override: Override) -> bool:
    """Set a value as Hydra does; False for what is no plain value, and for what is not taken."""
    is_plain = override.package is None and not override.is_sweep_override()
    if not is_plain or override.is_delete() or override.is_add():
        return False
    key, add = override.key_or_group, override.is_force_add()
    try:
        OmegaConf.update(config, key, override.value(), merge=True, force_add=add)
    except (OmegaConfBaseException, ValueError):
        return False
    return True


def as_hydra_takes_it(text: str, catalogue: Catalogue) -> str:
    """An override for Hydra's own ears: it adds to a mapping only what is marked as an addition.

    `++precision=bf16`, set or add, is what a W&B agent types; Hydra takes it for keys only.
    """
    key, equals, value = text.lstrip("+").partition("=")
    mapping = key in catalogue.keys and catalogue.keys[key].kind is dict
    if mapping or catalogue.is_entry(key):
        return f"++{key}{equals}{value}"
    return text.removeprefix("++") if key in catalogue.options else text
