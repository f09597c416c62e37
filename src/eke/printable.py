"""Names, logs and records as text that a terminal shows and never obeys, nor a spreadsheet."""

import re

_HIDDEN = (
    r"[\x00-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    r"\U000e0000-\U000e007f]"
)
"""Control characters, among them the first of every escape sequence; what turns text around
(Unicode's bidirectional controls) or has no width."""

_COLOUR = r"\x1b\[[\d;:]*m"
_FORMULA = re.compile(rf"(?:[\s'\"]|{_HIDDEN})*[=+\-@\uff1d\uff0b\uff0d\uff20]|\s|{_HIDDEN}")


def printable(text: str, lines: bool = False, colours: bool = False) -> str:
    """Text with every hidden character replaced by a visible one.

    Args:
        text: anybody's.
        lines: it may have several lines, and tabs.
        colours: it may have colours, which end with it.
    """
    kept = "|".join([*([r"[\n\t]"] if lines else []), *([_COLOUR] if colours else [])]) or "(?!)"
    shown = re.sub(
        rf"({kept})|{_HIDDEN}", lambda sign: sign[1] or "\N{REPLACEMENT CHARACTER}", text
    )
    return f"{shown}\x1b[m" if colours and "\x1b" in shown else shown


def inert(cell: object) -> object:
    """A cell that a spreadsheet takes for text (https://owasp.org/www-community/attacks/CSV_Injection)."""
    return f"'{cell}" if isinstance(cell, str) and _FORMULA.match(cell) else cell
