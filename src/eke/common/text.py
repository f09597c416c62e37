"""Tables, number formats, name suggestions and constants of the byte tokenizer."""

import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path


def align(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Format rows of equal length as a table. `right` are indices of right-aligned columns."""
    rows = [[" ".join(word.split("\n")) for word in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [">" if number in right else "<" for number in range(len(widths))]
    return [
        "  ".join(
            f"{word:{side}{width}}" for word, side, width in zip(row, sides, widths, strict=True)
        ).rstrip()
        for row in rows
    ]


KIB, MIB, GIB = 2**10, 2**20, 2**30

_ROUNDS_UP = 0.9995
"""Threshold from which three significant digits round up to the next unit: 999.5 k is 1 M."""


def format_bytes(num_bytes: float) -> str:
    """Format bytes in the largest suitable binary unit: `1.31 GiB`."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def format_count(count: float) -> str:
    """Format a count with a decimal prefix: `1.24 B`, `335 M`, `12.3 k`."""
    for suffix, size in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= size * _ROUNDS_UP:
            return f"{count / size:.3g} {suffix}"
    return f"{count:.0f}" if float(count).is_integer() else f"{count:.3g}"


def format_number(count: int, what: str) -> str:
    """Format a number with its noun: `1 run`, `2 runs`."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def format_flops(flops: float) -> str:
    """Format floating-point operations with SI prefixes: `96.2 G`."""
    return format_count(flops).replace("B", "G")


def format_seconds(seconds: float) -> str:
    """Format a duration with suitable units: `12.3 ms`, `4.21 s`, `3 m 12 s`, `2 h 05 m`."""
    if seconds < _ROUNDS_UP:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 59.95:  # three digits would show 60 s
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} m"


def format_range(low: str, high: str) -> str:
    """Format two amounts, with their unit once if it is the same: `21.7 to 26.9 GiB`."""
    unit = high.rpartition(" ")[2] if high.count(" ") == 1 else ""
    return f"{low.removesuffix(f' {unit}') if unit else low} to {high}"


def format_value(value: object, text: Callable[[str], str] = str) -> str:
    """Format a configuration value as on the command line. `text` formats strings."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return f"[{','.join(format_value(each, text) for each in value)}]"
    if isinstance(value, dict):
        items = (f"{key}:{format_value(each, text)}" for key, each in value.items())
        return f"{{{','.join(items)}}}"
    return text(value) if isinstance(value, str) else str(value)


_PLAIN = re.compile(
    r"(?!(?:null|true|false|inf|nan)$)(?:[a-z_/]|\.\.?/|\.[a-z_])[\w./+@%:-]*",
    re.ASCII | re.IGNORECASE,
)
"""Pattern of texts without quotes in Hydra's grammar: no number, keyword or separator."""


def override(key: str, value: object) -> str:
    """Format `key=VALUE` for Hydra. Every fix with a user's text must use it."""
    return f"{key}={format_value(value, _quoted_if_needed)}"


def _quoted_if_needed(text: str) -> str:
    if _PLAIN.fullmatch(text):
        return text
    escaped = text.replace("${", "\\${")  # not an interpolation
    return quoted(escaped) if "'" in text or "\\" in text else f"'{escaped}'"


def quoted(value: str) -> str:
    """Quote a value so that Hydra's grammar reads it as one string."""
    escaped = re.sub(r'(\\*)"', lambda match: match[1] * 2 + '\\"', value)
    # A backslash before the closing quote would escape it.
    tail = len(escaped) - len(escaped.rstrip("\\"))
    return f'"{escaped}{chr(92) * tail}"'


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return next(filter(None, map(str.strip, str(error).splitlines())), repr(error))


def normalize_name(name: str) -> str:
    """Normalize the case of a name, and dashes to underscores."""
    return name.strip().lower().replace("-", "_")


def suggest_match(name: str, names: Iterable[str]) -> str | None:
    """Return the likely name: equal except for case and dashes, or begun, or mistyped."""
    typed = normalize_name(name)
    known = {normalize_name(candidate): candidate for candidate in reversed(list(names))}
    if typed in known:
        return known[typed]
    begun = [each for each in known if len(typed) > 1 and each.startswith(typed)]
    if len(begun) == 1:
        return known[begun[0]]
    allowed = 1 + (len(typed) >= 8)
    # A different first letter often means another word: mt5, albert.
    like = [
        each
        for each in reversed(known)
        if each[:1] == typed[:1] and abs(len(each) - len(typed)) <= allowed
    ]
    near = min(((_mistakes(typed, each), at) for at, each in enumerate(like)), default=(99, 0))
    return known[like[near[1]]] if near[0] <= allowed else None


_MAX_LISTED_NAMES = 8


def list_closest(name: str, names: Iterable[str], topic: str) -> str:
    """List names: all if they are few, else the closest ones and the help page with all."""
    typed, known = normalize_name(name), list(names)
    if len(known) <= _MAX_LISTED_NAMES + 1:
        return ", ".join(known)
    near = sorted(known, key=lambda each: _mistakes(typed, each[: len(typed) + 2]))
    return f"{', '.join(near[:_MAX_LISTED_NAMES])} (all: --help {topic})"


def _mistakes(typed: str, meant: str) -> int:
    """Return the optimal string alignment distance: inserted, missing, wrong, swapped letters."""
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
    """Return a similar name in the folder of a missing path, None if there is none."""
    try:
        siblings = os.listdir(missing.parent)
    except (OSError, ValueError):  # the folder is also missing, or a null character
        return None
    plain = [name for name in siblings if name.isprintable()]
    found = suggest_match(missing.name, plain) if len(plain) <= 1000 else None  # a time limit
    return missing.parent / found if found else None


PAD, BOS, EOS, MASK, SEP = 0, 1, 2, 3, 4
"""Special tokens. BOS also separates documents in packed text."""

NUM_SPECIAL_TOKENS = 8
"""Number of special ids (three are spare). Byte b is token b + 8."""

BYTE_VOCABULARY = NUM_SPECIAL_TOKENS + 256

IGNORED = -100
"""Label of a position excluded from the loss (torch's cross_entropy default)."""
