"""The files of conf/: each option composes, names itself, and technique options carry a card."""

import re
from functools import cache
from itertools import zip_longest
from pathlib import Path

import pytest
from reference.cards import LINES, TECHNIQUES

from eke.common.paths import conf_folder
from eke.config.compose.catalogue import GROUPS, headline, make_catalogue
from eke.config.compose.compose_cache import make_trees
from eke.config.compose.composer import Composed, compose_cells
from eke.config.schema import ENTRIES

CATALOGUE = make_catalogue()
PRESETS = ("recipe", "experiment", "sweep")
ALL = [(g, o, file) for g, options in CATALOGUE.options.items() for o, file in options.items()]
IDS = [f"{group}={option}" for group, option, _ in ALL]
CARDS = [(g, o, file) for g, o, file in ALL if g in TECHNIQUES]
CARD_IDS = [f"{group}={option}" for group, option, _ in CARDS]


def needed(group: str, option: str) -> list[str]:
    places = {
        "data": {
            "text": "path", "jsonl": "path", "csv": "path", "parquet": "path", "chat": "path",
            "hub": "name", "chat_hub": "name",
        },
        "model": {"pretrained": "name_or_path"},
        "offload": {"nvme": "path"},
    }  # fmt: skip
    if option == "custom" and group != "task":
        return [f"{group}.target=net.Net"]
    if option == "mix":
        return ["data.sources=[{option:jsonl,path:FOLDER}]"]
    key = places.get(group, {}).get(option)
    return [f"{group}.{key}=FOLDER"] if key else []


COLUMNS = [
    [f"{group}={option}" for option in options]
    for group, options in CATALOGUE.options.items()
    if group not in PRESETS
]
ROWS = {choice: row for row in map(tuple, zip_longest(*COLUMNS)) for choice in row if choice}
"""Row n has the n-th option of every group: each writes into its own section only (below)."""


@cache
def composed_row(row: tuple[str | None, ...]) -> Composed:
    choices = [choice for choice in row if choice]
    keys = [key for choice in choices for key in needed(*choice.split("="))]
    [composed] = compose_cells([(*choices, *keys)], make_trees(CATALOGUE))
    return composed


@pytest.mark.parametrize(("group", "option", "file"), ALL, ids=IDS)
def test_every_option_composes_and_names_itself(group: str, option: str, file: Path) -> None:
    composed = composed_row(ROWS.get(f"{group}={option}", (f"{group}={option}",)))
    # Models of random weights all have sdpa.
    taken = "sdpa" if (group, option) == ("attention", "auto") else option
    assert composed.choices[group] == taken
    text = file.read_text()
    assert headline(file), "the first comment line says what the option is"
    if group in PRESETS:
        assert text.startswith("# @package _global_\n")
        assert f"{group}={option}" in headline(file)
    elif group in ENTRIES:
        assert getattr(composed.config, group) == {}
        assert headline(file).startswith(f"{group}={option} ")
    else:
        assert getattr(composed.config, group).option == taken
        assert re.findall(r"^option: (.+)$", text, flags=re.MULTILINE) == [option]
        assert headline(file).startswith(f"{group}={option} ")


@pytest.mark.parametrize(("group", "option", "file"), CARDS, ids=CARD_IDS)
def test_technique_has_its_card(group: str, option: str, file: Path) -> None:
    head, *lines = card(file)
    must_be_typed = r"( \S+=[A-Z_]+)*"
    assert re.fullmatch(rf"{group}={option}{must_be_typed} -- .+\.", head)
    assert [line.split()[0] for line in lines] == list(LINES)
    assert all(len(line.split()) > 1 for line in lines), "a line of the card is empty"
    claims = " ".join(line for line in lines if line.split()[0] in ("Costs", "Saves"))
    if re.search(r"\d\s*(%|x\b|times\b|GB|GiB|MB|MiB)", claims):
        source = r"https?://\S+|arXiv:\d{4}\.\d{4,5}|record [0-9a-f]{16}"
        assert re.search(source, " ".join([head, *lines])), "a measured number has no source"


def card(file: Path) -> list[str]:
    """The comment lines at the top, without their hash."""
    lines = []
    for line in file.read_text().splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return lines


def test_every_group_has_its_line_of_help_and_every_line_a_group() -> None:
    folders = {p.name for p in conf_folder().iterdir() if p.is_dir()} - {"hydra"}
    assert folders == set(GROUPS)


def test_every_group_starts_from_an_option_that_exists() -> None:
    assert set(CATALOGUE.defaults) == set(CATALOGUE.options)
    for group, option in CATALOGUE.defaults.items():
        assert option in CATALOGUE.options[group]
