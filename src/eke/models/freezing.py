"""Weights selected by the entries of `model.freeze`, and suggestions for unknown entries.

An entry selects every weight whose dotted name contains the entry's parts in succession:
`embeddings`, `encoder.layer.0-5.attention`. `0-5` matches the numbers 0 to 5.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches

from eke.common.errors import Fix, Problem
from eke.common.text import format_value, override

_SHOWN = 4
"""Number of names listed in an error."""

_Weights = Mapping[tuple[str, ...], bool]
"""Names of a weight (several for a shared tensor) -> whether it is trained if not frozen."""

_NUMBER = re.compile(r"\b\d+(?:-\d+)?\b")


def is_frozen(entries: Iterable[str], names: Sequence[str]) -> bool:
    """Return whether an entry matches one of the names of a weight."""
    return any(_is_named(entry.split("."), n.split(".")) for n in names for entry in entries)


def _is_named(wanted: list[str], parts: list[str]) -> bool:
    places = range(len(parts) - len(wanted) + 1)
    return any(all(map(_is_part, wanted, parts[place:])) for place in places)


def _is_part(wanted: str, part: str) -> bool:
    if part.isdecimal() and _NUMBER.fullmatch(wanted):
        low, _, high = wanted.partition("-")
        return int(low) <= int(part) <= int(high or low)
    return wanted == part


def find_problem(entries: Sequence[str], weights: _Weights, what: str) -> Problem | None:
    """Return the problem of entries that match no weight or every trained weight, else None."""
    wrong = [e for e in entries if not any(is_frozen([e], names) for names in weights)]
    if wrong:
        near = {entry: _similar_names(entry, weights) for entry in wrong}
        instead = [name for e in entries for name in near.get(e, [e])[:1]]
        shown = ", ".join(near[wrong[0]]) or "no known names"
        why = f"matches no weight of {what}. Names: {shown}, ..."
        value, fix = ",".join(map(format_value, wrong)), Fix(override("model.freeze", instead))
        return Problem("model.freeze", value, why, fix, "unknown_weight")
    if entries and all(is_frozen(entries, n) for n, trained in weights.items() if trained):
        why, fix = f"freezes every trained weight of {what}", Fix("model.freeze=[]")
        return Problem("model.freeze", format_value(list(entries)), why, fix, "nothing_trained")
    return None


def _similar_names(entry: str, weights: _Weights) -> list[str]:
    """Return names of modules and weights similar to an entry, the most similar first."""
    known: dict[str, str] = {}  # name with # for each number -> first such name
    for parts in (name.split(".") for names in weights for name in names):
        for start in range(2 if len(parts) > 2 else 1):  # with and without the common first part
            for stop in range(start + 1, len(parts) + 1):
                path = ".".join(parts[start:stop])
                known.setdefault(_NUMBER.sub("#", path), path)

    def numbered(path: str) -> str:  # with the entry's layer numbers, if these layers exist
        typed = path
        for number in _NUMBER.findall(entry):
            typed = typed.replace("#", number, 1)
        return typed if any(is_frozen([typed], names) for names in weights) else known[path]

    near = get_close_matches(_NUMBER.sub("#", entry), known, _SHOWN, cutoff=0)
    return [numbered(path) for path in near]
