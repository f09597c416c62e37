"""Options of different groups compose with each other: every pair, in few compositions."""

from functools import cache
from itertools import combinations, product

import pytest
from conf.test_conf_options import needed

from eke.config.compose import compose
from eke.config.compose.catalogue import make_catalogue

Row = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]


def pairs_of(row: Row, groups: list[str]) -> set[Pair]:
    """The pairs of (group, option) in one row, groups in their order."""
    return {((a, row[a]), (b, row[b])) for a, b in combinations(groups, 2) if a in row and b in row}


def all_pairs(options: dict[str, list[str]]) -> set[Pair]:
    """Every pair of options of two different groups."""
    return {
        ((a, one), (b, other))
        for a, b in combinations(options, 2)
        for one, other in product(options[a], options[b])
    }


def make_covering_array(options: dict[str, list[str]]) -> list[Row]:
    """Greedy (AETG, Cohen et al. 1997, doi:10.1109/32.605761), without chance: same in, same out.

    Each row starts from an uncovered pair; every other group then takes the option that covers
    most uncovered pairs with what the row has. So each row covers at least one new pair, and the
    loop ends.
    """
    groups = list(options)
    widest_first = sorted(options, key=lambda group: -len(options[group]))
    open_pairs = all_pairs(options)
    rows = []
    while open_pairs:
        row: Row = dict(min(open_pairs))
        for group in widest_first:
            if group not in row:
                row[group] = _best(group, options[group], row, groups, open_pairs)
        open_pairs -= pairs_of(row, groups)
        rows.append(row)
    return rows


def _best(
    group: str, candidates: list[str], row: Row, groups: list[str], open_pairs: set[Pair]
) -> str:
    before = [item for item in row.items() if groups.index(item[0]) < groups.index(group)]
    behind = [item for item in row.items() if groups.index(item[0]) > groups.index(group)]

    def gain(option: str) -> int:
        mine = (group, option)
        new = [*((item, mine) for item in before), *((mine, item) for item in behind)]
        return sum(pair in open_pairs for pair in new)

    return max(candidates, key=gain)


OPTIONS = {group: list(options) for group, options in make_catalogue().options.items()}


def test_array_of_small_groups_is_minimal() -> None:
    # Two groups of two and three options have 6 pairs; 6 rows cover them and fewer cannot.
    assert len(make_covering_array({"a": ["1", "2"], "b": ["x", "y", "z"]})) == 6


def test_array_covers_every_pair_with_few_rows() -> None:
    rows = covering_rows()
    covered = set().union(*(pairs_of(row, list(OPTIONS)) for row in rows))
    assert covered == all_pairs(OPTIONS)
    sizes = sorted((len(options) for options in OPTIONS.values()), reverse=True)
    # At least the product of the two largest groups; greedy stays below twice that.
    assert sizes[0] * sizes[1] <= len(rows) < 2 * sizes[0] * sizes[1]


@cache
def covering_rows() -> list[Row]:
    """Of all groups and options there are."""
    return make_covering_array(OPTIONS)


@pytest.mark.parametrize(
    "every",
    [pytest.param(1, id="all", marks=pytest.mark.slow), pytest.param(120, id="a sample")],
)
def test_every_pair_of_options_composes(every: int) -> None:
    for row in covering_rows()[::every]:
        overrides = [f"{group}={option}" for group, option in row.items()]
        overrides += [key for choice in row.items() for key in needed(*choice)]
        chosen = compose(overrides, in_sweep=True).choices
        if row["attention"] == "auto" and row["model"] != "pretrained":  # read from a checkpoint
            row = {**row, "attention": "sdpa"}
        assert chosen == row
