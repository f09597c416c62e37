"""Names that were probably meant."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

MAX_BESIDE = 1000
"""Files in a folder; to compare more names than these takes too long."""


def normal(name: str) -> str:
    """A name without what people vary: case, and dashes for underscores."""
    return name.strip().lower().replace("-", "_")


def closest(name: str, names: Iterable[str]) -> str | None:
    """The name that was probably meant: equal but for case and dashes, else begun or mistyped.

    Begun: the only one that starts with what was typed. Mistyped: one letter too many, too few,
    wrong or swapped with the next one; two in a name of eight letters or more. Names that share
    letters only (`tags`, `task`) mean different things.
    """
    typed = normal(name)
    known = {normal(candidate): candidate for candidate in reversed(list(names))}
    if typed in known:
        return known[typed]
    begun = [each for each in known if len(typed) > 1 and each.startswith(typed)]
    if len(begun) == 1:
        return known[begun[0]]
    allowed = 1 + (len(typed) >= 8)
    # The first letter is rarely the wrong one, and often another word's: mt5, albert.
    like = [
        each
        for each in reversed(known)
        if each[:1] == typed[:1] and abs(len(each) - len(typed)) <= allowed
    ]
    near = min(((_mistakes(typed, each), at) for at, each in enumerate(like)), default=(99, 0))
    return known[like[near[1]]] if near[0] <= allowed else None


def _mistakes(typed: str, meant: str) -> int:
    """Letters added, left out, wrong or swapped (optimal string alignment distance)."""
    before: list[int] = []
    last = list(range(len(meant) + 1))
    for i, letter in enumerate(typed):
        row = [i + 1]
        for j, wanted in enumerate(meant):
            row.append(min(last[j] + (letter != wanted), last[j + 1] + 1, row[j] + 1))
            if i and j and letter == meant[j - 1] and typed[i - 1] == wanted:
                row[-1] = min(row[-1], before[j - 1] + 1)
        before, last = last, row
    return last[-1]


def closest_path(missing: Path) -> Path | None:
    """What lies beside a path that is not there, if it was probably meant and needs no quotes."""
    try:
        beside = os.listdir(missing.parent)
    except (OSError, ValueError):  # that folder is not there either; a null character
        return None
    plain = [name for name in beside if re.fullmatch(r"[\w][\w.+-]*", name)]
    found = closest(missing.name, plain) if len(plain) <= MAX_BESIDE else None
    return missing.parent / found if found else None
