"""Small pieces of error messages: nearest names, shell quoting, Hydra's own words made short."""

import re
import shlex

from eke.common.did_you_mean import closest as closest
from eke.common.did_you_mean import normal as normal
from eke.common.paths import program


def multirun() -> str:
    """How a sweep is started."""
    return f"{program()} -m"


def as_typed(*overrides: str) -> str:
    """Overrides as they have to be typed in a shell."""
    return shlex.join(overrides)


def swept(mended: list[list[str]]) -> str:
    """`data=hub data.name=imdb,squad` of what each value is typed as; empty where they differ."""
    keys = {(*words[:-1], words[-1].partition("=")[0]) for words in mended if words}
    if len(keys) != 1 or not all(mended):
        return ""
    *first, key = keys.pop()
    values = dict.fromkeys(words[-1].partition("=")[2] for words in mended)
    return as_typed(*first, f"{key}={','.join(values)}")


def quoted(value: str) -> str:
    """A value that Hydra's grammar takes as one text, whatever it holds."""
    escaped = re.sub(r'(\\*)"', lambda match: match[1] * 2 + '\\"', value)
    # A backslash before the closing quote would escape it.
    tail = len(escaped) - len(escaped.rstrip("\\"))
    return f'"{escaped}{chr(92) * tail}"'


def first_line(error: BaseException) -> str:
    """What a library's exception says, without its location prefix and its stack of details."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and re.search(r"raised while composing config:$", lines[0]):
        lines = lines[1:]
    if error.__cause__ and (not lines or lines[0].startswith("Error merging")):
        return first_line(error.__cause__)
    text = lines[0] if lines else type(error).__name__
    return re.sub(r"^In '[^']*': ", "", text)


def shown(text: str) -> str:
    """User's text inside a sentence: visible when blank, short when long, on one line."""
    printable = text if text.isprintable() else repr(text)[1:-1]
    return printable if len(printable) <= 60 else printable[:57] + "..."
