"""What Hydra makes of files and chosen options, and the typed values put into it.

Choosing options takes Hydra a fifth of a second, setting a value a thousandth. So the tree of a set
of choices is kept: the cells of a sweep, which often differ in values alone, pay for it once.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from omegaconf import DictConfig, open_dict, read_write

from eke.compose.catalogue import Catalogue
from eke.compose.overrides import as_hydra_takes_it
from eke.compose.wording import quoted
from eke.paths import conf_folder
from eke.schema import register

_MAX_KEPT = 64
"""Trees of different choices that are kept; one has about 100 kB."""


def compose_tree(
    overrides: Sequence[str], catalogue: Catalogue
) -> tuple[DictConfig, dict[str, str]]:
    """The tree of these overrides, without Hydra's own part, and the option of each group.

    Raises:
        Exception: whatever Hydra and OmegaConf raise at what does not go together.
    """
    texts = [as_hydra_takes_it(text, catalogue) for text in overrides]
    parsed = OverridesParser.create().parse_overrides(texts)
    values = [override for override in parsed if _is_value(override, catalogue)]
    chosen = tuple(o.input_line or "" for o in parsed if not _is_value(o, catalogue))
    folders = catalogue.folders[1:]
    # A user's own files may change between two calls; eke's do not.
    choose = _choose if folders else _choose_once
    tree, choices = choose(chosen, conf_folder(), folders)
    tree = copy.deepcopy(tree)
    ConfigLoaderImpl._apply_overrides_to_config(values, tree)
    return tree, dict(choices)


def _is_value(override: Override, catalogue: Catalogue) -> bool:
    """Whether it sets a key, so that it decides nothing about which files are read."""
    key = override.key_or_group
    known = key in catalogue.keys or catalogue.is_entry(key)
    return known and key not in catalogue.options and not override.is_sweep_override()


def _choose(
    chosen: tuple[str, ...], conf: Path, folders: tuple[Path, ...]
) -> tuple[DictConfig, dict[str, str]]:
    with _hydra(conf):
        extra = [f"hydra.searchpath=[{quoted(str(folder))}]" for folder in folders]
        tree = hydra_compose("config", [*chosen, *extra], return_hydra_config=True)
    found = tree.hydra.runtime.choices
    choices = {str(g): str(o) for g, o in found.items() if not str(g).startswith("hydra/")}
    with read_write(tree), open_dict(tree):
        del tree["hydra"]
    return tree, choices


_choose_once = lru_cache(_MAX_KEPT)(_choose)


@contextmanager
def _hydra(conf: Path) -> Iterator[None]:
    """Hydra's global state set up, and put back as it was."""
    if "schema.yaml" not in ConfigStore.instance().repo:
        register()
    before = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf), version_base="1.3", job_name="eke"):
            yield
    finally:
        GlobalHydra.instance().hydra = before
