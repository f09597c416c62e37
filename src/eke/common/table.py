"""Tables that fit the terminal: the least useful columns are removed, then texts stand below."""

from collections.abc import Sequence
from dataclasses import dataclass

from eke.common.output import printable
from eke.common.screen import wrap

_GAP = 2
"""Spaces before each column."""

_SHORT = 16
"""Length beyond which a text stands below its row before columns are removed: a choice."""


@dataclass(frozen=True)
class Column:
    """Column of a table. Columns without any text are not shown."""

    title: str
    cells: Sequence[str]
    right: bool = False
    """True for numbers: aligned to the right, always in their column."""
    rank: int = 0
    """Columns with the highest rank are removed first. 0: never."""


def render_table(columns: Sequence[Column], width: int) -> list[str]:
    """Return the header and each row. Texts that do not fit are on further lines of their row."""
    shown = [
        (column, [_plain(text) for text in (column.title, *column.cells)])
        for column in columns
        if any(column.cells)
    ]
    needs = [max(map(text_width, texts)) for _, texts in shown]
    sides = [column.right for column, _ in shown]
    # Long texts need no width, since they may stand below their row.
    least = [n + _GAP if right or n <= _SHORT else 0 for n, right in zip(needs, sides, strict=True)]
    while sum(least) > width:
        rank, at = max(((c.rank, n) for n, (c, _) in enumerate(shown)), default=(0, 0))
        if not rank:  # the other columns are always shown
            break
        del shown[at], needs[at], least[at], sides[at]
    kept, texts = list(range(len(shown))), [n for n, right in enumerate(sides) if not right]
    texts.sort(key=lambda n: needs[n])  # the longest are moved below first
    while texts and sum(needs[n] + _GAP for n in kept) > width:
        kept.remove(texts.pop())
    below, lines = [n for n in range(len(shown)) if n not in kept], list[str]()
    for number, cells in enumerate(zip(*(cells for _, cells in shown), strict=True)):
        parts = [_cell(cells[n], sides[n], needs[n]) for n in kept]
        named = [_named(shown[n][1][0], cells[n]) for n in below if number and cells[n]]
        more = wrap("  ".join(named), width, " " * 2 * _GAP) if named else []
        lines.append("\n".join(["".join(parts).rstrip(), *more]))
    return lines


def _named(title: str, text: str) -> str:
    """Return a text with its title, as an override if it is a value."""
    if "=" in text:
        return text
    return f"{title}: {text}" if " " in text else f"{title}={text}"


def _cell(text: str, right: bool, size: int) -> str:
    space = " " * (size - text_width(text))
    return " " * _GAP + (space + text if right else text + space)


def _plain(text: str) -> str:
    return printable(" ".join(text.split("\n")), colours=False)


def text_width(text: str) -> int:
    """Return the columns of a text. Chinese signs, for example, have two."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)
