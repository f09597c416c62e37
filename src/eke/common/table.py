"""Tables that fit the terminal: the least useful columns are removed, then texts are shortened."""

from collections.abc import Sequence
from dataclasses import dataclass

from eke.common.output import printable

_GAP = 2
"""Spaces before each column."""

_SHORT = 16
"""Length to which texts may be shortened before columns are removed."""


@dataclass(frozen=True)
class Column:
    """Column of a table. Columns without any text are not shown."""

    title: str
    cells: Sequence[str]
    right: bool = False
    """True for numbers: aligned to the right and never shortened."""
    rank: int = 0
    """Columns with the highest rank are removed first. 0: never."""


def render_table(columns: Sequence[Column], width: int) -> list[str]:
    """Return the header and one line for each row, at most `width` columns wide."""
    shown = [
        (column, [_plain(text) for text in (column.title, *column.cells)])
        for column in columns
        if any(column.cells)
    ]
    needs = [max(map(_length, texts)) for _, texts in shown]
    least = [n if c.right else min(n, _SHORT) for n, (c, _) in zip(needs, shown, strict=True)]
    while sum(least) + _GAP * len(least) > width:
        rank, at = max(((c.rank, n) for n, (c, _) in enumerate(shown)), default=(0, 0))
        if not rank:
            break
        del shown[at], needs[at], least[at]
    texts_only = [n for n, (column, _) in enumerate(shown) if not column.right]
    while texts_only and sum(needs) + _GAP * len(needs) > width:
        longest = max(texts_only, key=lambda n: needs[n])
        if needs[longest] <= 3:  # a letter, an ellipsis and a letter
            break
        needs[longest] -= 1
    rows = zip(*(texts for _, texts in shown), strict=True)
    sides = [column.right for column, _ in shown]
    return ["".join(map(_cell, row, sides, needs)).rstrip() for row in rows]


def _cell(text: str, right: bool, size: int) -> str:
    words, cut = text.split(" "), text
    while _length(cut) > size and len(words) > 1:
        del words[half := len(words) // 2]
        cut = " ".join([*words[:half], "…", *words[half:]])
    if _length(cut) > size:  # the end of a path or an override tells more
        over = _length(text) - size
        keep = max(0, (len(text) - over - 1) // 2)
        cut = f"{text[:keep]}…{text[keep + over + 1 :]}"
    space = " " * (size - _length(cut))
    return " " * _GAP + (space + cut if right else cut + space)


def _plain(text: str) -> str:
    return printable(" ".join(text.split("\n")), colours=False)


def _length(text: str) -> int:
    """Return the columns of a text. Chinese signs, for example, have two."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)
