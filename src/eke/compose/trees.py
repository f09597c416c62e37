"""Composed trees. Hydra composes one in 0.1 to 0.3 s; most can do with less.

Setting a value takes a thousandth of choosing an option: the tree of a set of options is kept, and
values are set on a copy. What a sweep's cells share is composed once as well:

- Values (`optimizer.lr=0.1`) are set on a copy of a tree with the same options, as Hydra does last.
- A section depends on its own group's option and on the presets, on nothing else. So a tree with
  two options typed takes each section from a tree with that option alone. Where an option's file
  writes into other sections (a user's own may), Hydra composes the whole.
"""

import copy
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from hydra import compose as hydra_compose
from hydra import initialize_config_dir

# Setting a value in a composed tree: no public name of Hydra's does it. The tests compare the
# result with Hydra's own, so that another version that does it otherwise is noticed.
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, flag_override, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from eke.compose.catalogue import Catalogue
from eke.compose.overrides import as_hydra_takes_it, parse
from eke.compose.wording import quoted
from eke.paths import conf_folder
from eke.schema import register

PRESETS = ("recipe", "experiment", "sweep")
"""Groups whose files may write anywhere."""

MAX_KEPT = 64
"""Trees of different options that are kept; one has about 100 kB."""


@dataclass(frozen=True)
class Tree:
    """A composed configuration before it is typed, without Hydra's own part."""

    config: DictConfig
    choices: dict[str, str]
    """Group -> option."""
    params: object = None
    """`hydra.sweeper.params`, which only Hydra's own sweepers read."""


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


def compose_tree(
    overrides: Sequence[str], catalogue: Catalogue, config_dir: Path | None
) -> DictConfig:
    """What Hydra composes, its own part included; inside `hydra_state`. Raises what it raises."""
    texts = [as_hydra_takes_it(text, catalogue) for text in overrides]
    parsed = OverridesParser.create().parse_overrides(texts)
    values = [override for override in parsed if _is_value(override, catalogue)]
    chosen = tuple(o.input_line or "" for o in parsed if not _is_value(o, catalogue))
    # A user's own files may change between two calls; eke's do not.
    choose = _choose if config_dir else _choose_once
    tree = copy.deepcopy(choose(chosen, config_dir, conf_folder()))
    ConfigLoaderImpl._apply_overrides_to_config(values, tree)
    return tree


def _is_value(override: Override, catalogue: Catalogue) -> bool:
    """Whether it sets a key, so that it decides nothing about which files are read."""
    key = override.key_or_group
    known = key in catalogue.keys or catalogue.is_entry(key)
    return known and key not in catalogue.options and not override.is_sweep_override()


def _choose(chosen: tuple[str, ...], config_dir: Path | None, _conf: Path) -> DictConfig:
    extra = [f"hydra.searchpath=[{quoted(str(config_dir))}]"] if config_dir else []
    return hydra_compose("config", [*chosen, *extra], return_hydra_config=True)


_choose_once = lru_cache(MAX_KEPT)(_choose)


def without_hydra(tree: DictConfig) -> Tree:
    """Hydra's part taken out of a tree."""
    chosen = tree.hydra.runtime.choices
    choices = {str(g): str(o) for g, o in chosen.items() if not str(g).startswith("hydra/")}
    params = OmegaConf.select(tree, "hydra.sweeper.params")
    with read_write(tree), open_dict(tree):
        del tree["hydra"]
    return Tree(tree, choices, params)


class NotSet(Exception):
    """Values that the tree does not take."""

    def __init__(self, texts: list[str], choices: dict[str, str]) -> None:
        super().__init__(" ".join(texts))
        self.texts = texts
        self.choices = choices


class Trees:
    """Trees of one sweep's cells. What went wrong in a shortcut, Hydra's own composition says."""

    def __init__(self, catalogue: Catalogue, config_dir: Path | None) -> None:
        self._catalogue = catalogue
        self._config_dir = config_dir
        self._parsed: dict[str, Override] = {}
        self._kept: dict[tuple[str, ...], tuple[bytes, dict[str, str]]] = {}
        self._alone: dict[tuple[str, ...], bool] = {}
        self._params: dict[tuple[str, ...], object] = {}
        self.num_composed = 0
        """How often Hydra has composed."""

    def tree(self, overrides: Sequence[str]) -> Tree:
        """The tree of a cell, inside `hydra_state`.

        Raises:
            NotSet: values that the options' sections do not take.
            Exception: whatever Hydra raises while it composes the options.
        """
        options = tuple(text for text in overrides if self.chooses(text))
        content, choices = self._with_options(options)
        config: DictConfig = pickle.loads(content)  # pickled in this process
        refused = [t for t in overrides if t not in options and not self._set(config, t)]
        if refused:
            raise NotSet(refused, choices)
        return Tree(config, choices, self._params.get(options))

    def parsed(self, text: str) -> Override:
        """What Hydra understands, remembered."""
        if text not in self._parsed:
            self._parsed[text] = parse(as_hydra_takes_it(text, self._catalogue))
        return self._parsed[text]

    def chooses(self, text: str) -> bool:
        """Whether Hydra has to know it to compose: an option, or a setting of Hydra's own."""
        key = self.parsed(text).key_or_group
        return key in self._catalogue.options or key.startswith("hydra")

    def _set(self, config: DictConfig, text: str) -> bool:
        parsed = self.parsed(text)
        key, add = parsed.key_or_group, parsed.is_force_add()
        try:
            OmegaConf.update(config, key, parsed.value(), merge=True, force_add=add)
        except (OmegaConfBaseException, ValueError):
            return False
        return True

    def _with_options(self, options: tuple[str, ...]) -> tuple[bytes, dict[str, str]]:
        if options not in self._kept:
            shared = tuple(text for text in options if self._is_shared(text))
            single = [text for text in options if text not in shared]
            if len(single) > 1 and all(self._stands_alone(shared, text) for text in single):
                self._kept[options] = self._joined(shared, single)
            else:
                self._kept[options] = self._composed(options)
        return self._kept[options]

    def _composed(self, options: tuple[str, ...]) -> tuple[bytes, dict[str, str]]:
        self.num_composed += 1
        tree = without_hydra(compose_tree(options, self._catalogue, self._config_dir))
        self._params[options] = tree.params
        return pickle.dumps(tree.config), tree.choices

    def _is_shared(self, text: str) -> bool:
        key = self.parsed(text).key_or_group
        return key in PRESETS or key.startswith("hydra") or key not in self._catalogue.sections

    def _stands_alone(self, shared: tuple[str, ...], text: str) -> bool:
        """Whether an option changes its own section only."""
        key = (*shared, text)
        if key not in self._alone:
            group = self.parsed(text).key_or_group
            without, with_it = (pickle.loads(self._with_options(each)[0]) for each in (shared, key))
            self._alone[key] = all(
                _same(without, with_it, name) for name in without if name != group
            )
        return self._alone[key]

    def _joined(self, shared: tuple[str, ...], single: list[str]) -> tuple[bytes, dict[str, str]]:
        content, choices = self._with_options(shared)
        config: DictConfig = pickle.loads(content)
        choices = dict(choices)
        with flag_override(config, ["struct", "readonly"], [False, False]):
            for text in single:
                group = self.parsed(text).key_or_group
                part, part_choices = self._with_options((*shared, text))
                config[group] = pickle.loads(part)._get_node(group)
                choices[group] = part_choices[group]
        return pickle.dumps(config), choices


def _same(one: DictConfig, other: DictConfig, name: str) -> bool:
    """Whether a section, or a single key, is the same in both: its values and its class."""
    types = [OmegaConf.get_type(tree, name) for tree in (one, other)]
    values = [
        OmegaConf.to_container(OmegaConf.create({"x": tree._get_node(name)}), resolve=False)
        for tree in (one, other)
    ]
    return types[0] == types[1] and values[0] == values[1]
