"""Names that were probably meant."""

import difflib
from collections.abc import Iterable


def normal(name: str) -> str:
    """A name without what people vary: case, and dashes for underscores."""
    return name.strip().lower().replace("-", "_")


def closest(name: str, names: Iterable[str]) -> str | None:
    """The name that was probably meant: equal but for case and dashes, else near in spelling."""
    known = list(names)
    for candidate in known:
        if normal(candidate) == normal(name):
            return candidate
    by_spelling = {normal(candidate): candidate for candidate in known}
    # 0.6 is difflib's own default: about two of three letters in common.
    near = difflib.get_close_matches(normal(name), by_spelling, n=1, cutoff=0.6)
    return by_spelling[near[0]] if near else None
