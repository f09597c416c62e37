"""Values out of a file, or out of a list typed by hand, as texts that Hydra understands."""

from typing import Any

from eke.config.compose.formatting import quoted
from eke.config.compose.overrides import parse


def value_text(value: Any) -> str:
    """One value as it is typed behind `key=`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{','.join(value_text(item) for item in value)}]"
    if isinstance(value, dict):
        items = (f"{key}:{value_text(item)}" for key, item in value.items())
        return f"{{{','.join(items)}}}"
    if not isinstance(value, str):
        return str(value)
    return value if _is_plain(value) else quoted(value)


def _is_plain(text: str) -> bool:
    """Whether Hydra reads the bare text as this very text."""
    try:
        return bool(parse(f"key={text}").value() == text)
    except Exception:  # of several kinds: Hydra's own, ANTLR's
        return False


def sweep_text(key: str, values: Any) -> str:
    """`key=a,b` from a list of values, or from a text as it is typed behind -m."""
    if not isinstance(values, list):
        return f"{key}={values if isinstance(values, str) else value_text(values)}"
    return f"{key}={','.join(value_text(value) for value in values)}"


def split_list(raw: str) -> str:
    """`[a=b and c=d, e in (f, g)]` with each item in quotes, as Hydra's grammar wants it.

    Without brackets it is one item.
    """
    text = raw.strip()
    inside = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    items, depth, quote, item = [], 0, "", ""
    for letter in inside:
        if letter == "," and not depth and not quote:
            items.append(item)
            item = ""
            continue
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        depth += (letter == "(") - (letter == ")") if not quote else 0
        item += letter
    items = [_unquoted(each.strip()) for each in [*items, item]]
    return f"[{','.join(quoted(each) for each in items if each)}]"


def _unquoted(text: str) -> str:
    whole = len(text) > 1 and text[0] in "'\"" and text[-1] == text[0]
    return text[1:-1] if whole and text[0] not in text[1:-1] else text
