"""Rows of words, one below the other in columns."""

from collections.abc import Collection, Sequence


def align(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """One line a row, its columns two spaces apart, with no blanks behind the last word.

    Args:
        rows: of as many columns each, the heading, if there is one, among them.
            Their line breaks become blanks.
        right: numbers of the columns that end below each other, as numbers do.
    """
    rows = [[" ".join(word.split("\n")) for word in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [">" if number in right else "<" for number in range(len(widths))]
    return [
        "  ".join(
            f"{word:{side}{width}}" for word, side, width in zip(row, sides, widths, strict=True)
        ).rstrip()
        for row in rows
    ]
