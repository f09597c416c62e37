"""Header cards of the option files: what a technique does, costs, saves and needs."""

import re
from dataclasses import dataclass
from pathlib import Path

from eke.config.compose.catalogue import Catalogue, headline

TECHNIQUES = (
    "precision",
    "optimizer",
    "memory",
    "attention",
    "compile",
    "kernels",
    "distributed",
    "offload",
    "dataloader",
    "peft",
    "engine",
)
"""Groups whose options carry a card, in the order of the page."""

LINES = ("Does", "Costs", "Saves", "Needs", "Source")


@dataclass(frozen=True)
class Card:
    """One option, as its file describes it."""

    group: str
    option: str
    about: str
    """The headline without the option's name."""
    lines: dict[str, str]
    """`Does`, `Costs`, `Saves`, `Needs`, `Source` -> text."""

    @property
    def command(self) -> str:
        """The override that chooses it."""
        return f"{self.group}={self.option}"


def read_card(group: str, option: str, file: Path) -> Card:
    """The card at the top of an option file; a missing line is absent."""
    lines = {
        name: match[1].strip()
        for name in LINES
        if (match := re.search(rf"^# {name} +(.+)$", file.read_text(), flags=re.MULTILINE))
    }
    return Card(group, option, headline(file).partition(" -- ")[2].rstrip("."), lines)


def read_cards(catalogue: Catalogue, group: str) -> list[Card]:
    """The cards of one group, `none` first and the others by name."""
    options = catalogue.options[group]
    ordered = sorted(options, key=lambda option: (option != "none", option))
    return [read_card(group, option, options[option]) for option in ordered]
