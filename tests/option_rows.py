"""All options of eke in few compositions: row n has the n-th option of every group.

An option writes into its own section only (`test_each_of_ekes_options_stands_alone`), so that its
section is what it is alone, and trees of other options are joined from these rows without Hydra.
"""

from itertools import zip_longest

from eke.config.compose.catalogue import make_catalogue
from eke.config.compose.compose_cache import PRESETS, hydra_state, make_trees


def option_rows() -> list[tuple[str, ...]]:
    """The rows; each option of each group is in one. Presets write anywhere, and are in none."""
    groups = {g: o for g, o in make_catalogue().options.items() if g not in PRESETS}
    columns = [[f"{group}={option}" for option in options] for group, options in groups.items()]
    return [tuple(filter(None, row)) for row in zip_longest(*columns)]


def compose_rows() -> None:
    """Keep the trees of the rows in this process: 0.1 s each, and as much less for later ones."""
    with hydra_state():
        trees = make_trees(make_catalogue())
        for row in option_rows():
            trees.tree(row)
