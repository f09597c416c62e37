"""No effect is claimed by a number that somebody typed: it is a record's, or a named guide's."""

import re

import pytest
from reference.cards import TECHNIQUES, read_cards
from support import REPO

from eke.config.compose.catalogue import make_catalogue

EFFECT = re.compile(r"\b\d[\d.]*(?: ?%|x\b| ?(?:ms|s|GB|GiB|MB|MiB|times|samples/s)\b)")
"""A share, a factor, a time, an amount of memory or a rate."""
SOMEBODY = re.compile(r"\bguides?\b|\bsays\b|\bclaimed\b|arXiv|https://")
"""Who said so stands in the same line."""
GENERATED = re.compile(
    r"```.*?```|<!-- (\w+) -->.*?<!-- /\1 -->|^    .*?$", re.DOTALL | re.MULTILINE
)
"""Blocks of output, of code, and those that a test compares with what makes them."""


def claims_by_hand(text: str) -> list[str]:
    """Lines that claim an effect in numbers and name nobody who measured it."""
    lines = GENERATED.sub("", text).splitlines()
    return [line for line in lines if EFFECT.search(line) and not SOMEBODY.search(line)]


def test_readme_claims_no_effect_by_hand() -> None:
    assert claims_by_hand((REPO / "README.md").read_text()) == []


@pytest.mark.parametrize("group", TECHNIQUES)
def test_no_card_claims_an_effect_by_hand(group) -> None:
    for card in read_cards(make_catalogue(), group):
        said = [f"{name} {text}" for name, text in card.lines.items() if name != "Source"]
        assert claims_by_hand("\n".join([card.about, *said])) == [], card.command


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("eke is 1.3x faster", True),
        ("saves 20 % of memory", True),
        ("0.4 ms per step", True),
        ("up to 3x, says the guide", False),
        ("```\n20 % of memory\n```", False),
        ("<!-- help -->\n20 %\n<!-- /help -->", False),
        ("8 instead of 16 bytes per parameter", False),
        ("2 x rows x columns numbers", False),
    ],
)
def test_claims_without_a_record_are_detected(text, found) -> None:
    assert bool(claims_by_hand(text)) is found
