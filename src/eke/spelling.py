"""Names that were probably meant."""

import difflib
import os
import re
from collections.abc import Iterable
from pathlib import Path

MAX_BESIDE = 10_000
"""Files in a folder; to compare more names than these takes seconds."""


def normal(name: str) -> str:
    """A name without what people vary: case, and dashes for underscores."""
    return name.strip().lower().replace("-", "_")


def closest(name: str, names: Iterable[str]) -> str | None:
    """The name that was probably meant: equal but for case and dashes, else near in spelling.

    One that begins with what was typed is nearer than any other: `a100` is `a100_40`, not `h100`.
    """
    known = list(names)
    for candidate in known:
        if normal(candidate) == normal(name):
            return candidate
    begun = normal(name)
    longer = [each for each in known if len(begun) > 1 and normal(each).startswith(begun)]
    by_spelling = {normal(candidate): candidate for candidate in longer or known}
    # 0.6 is difflib's own default: about two of three letters in common.
    near = difflib.get_close_matches(begun, by_spelling, n=1, cutoff=0.1 if longer else 0.6)
    return by_spelling[near[0]] if near else None


def closest_path(missing: Path) -> Path | None:
    """What lies beside a path that is not there, if it was probably meant and needs no quotes."""
    try:
        beside = os.listdir(missing.parent)
    except (OSError, ValueError):  # that folder is not there either; a null character
        return None
    plain = [name for name in beside if re.fullmatch(r"[\w][\w.+-]*", name)]
    found = closest(missing.name, plain) if len(plain) <= MAX_BESIDE else None
    return missing.parent / found if found else None
