"""Mask secrets, by name and in URLs, in text for other people: plans, records, logs."""

import re
from collections.abc import Mapping
from typing import Any

_MASK = "***"

_WORD = (
    "(?:token|secret|password|passwd|passphrase|signature|authorization"
    "|(?:api|access|secret|private|auth)key)"
)
_NAME = rf"(?:[\w.-]*{_WORD}|[\w.-]*(?<=[_.?&-])key|(?<=[?&])sig)_?\d*"
"""Pattern of the last word of a name: HF_TOKEN, trainer.extra.hub_token, apiKey, but not `key`.
URLs signed by Amazon and Azure give access: X-Amz-Signature, sig."""

_VOCABULARY = re.compile(r"(?i)(max|min|num|per|pad|eos|bos|unk|sep|cls|mask)_?token_?\d*\W*$")
"""Pattern of names of text tokens and token counts, which are not secrets."""

_GIVEN = re.compile(
    rf"""(?i)(?P<name>(?<![\w.-]){_NAME}["']?\s*(?:[+:?]?=|:-)\s*"""  # NAME=VALUE, NAME:-VALUE
    rf"""|(?<=[{{,"'])\s*{_NAME}["']?\s*:\s*"""  # {{NAME: VALUE}}
    rf"""|(?<!\S)(?:--|setenv\s+){_NAME}\s+)"""  # --NAME VALUE
    r"""(?P<value>"[^"]*"|'[^']*'|[^\s"'&,;\]})]+)"""
)
_NO_SECRET = re.compile(
    r"""(?i)["']?(|null|none|true|false|\*\*\*|\.\.\.|\$\w+|\$\{(\w+\}|oc\.).*|(\$\(|`).*)["']?"""
)
"""Pattern of values without a secret: empty, or replaced by a shell or OmegaConf."""

_HEADER = re.compile(
    r"""(?i)(?P<name>(?<![\w.])(?:[\w.]*\.|proxy-)?authorization["']?\s*[:=]\s*["']?)"""
    r"""(?P<value>[^\s"'*$][^"'\r\n]*)"""
)
"""Pattern of an HTTP header, whose value has several words (`Bearer TOKEN`)."""

_USER = re.compile(
    r"(?i)\b(?!([\w.-]{0,30}\+)?ssh://[^\s/:@]+@)([a-z][a-z\d+.-]{0,30}://)(?!\*\*\*@)[^\s/@\"']+@"
)
"""Pattern of user and password in a URL. A user is a token for most servers, but not for ssh."""


def is_secret(name: str) -> bool:
    """Return whether a variable or key of this name holds a secret."""
    return bool(re.fullmatch(_NAME, name, re.IGNORECASE)) and not _VOCABULARY.search(name)


def mask(text: str) -> str:
    """Replace the secrets in a text."""

    def hidden(found: re.Match[str]) -> str:
        is_none = _VOCABULARY.search(found["name"]) or _NO_SECRET.fullmatch(found["value"])
        return found[0] if is_none else found["name"] + _MASK

    text = _HEADER.sub(rf"\g<name>{_MASK}", text)
    return _USER.sub(rf"\g<2>{_MASK}@", _GIVEN.sub(hidden, text))


def masked(value: Any, path: str = "", found: dict[str, str] | None = None) -> Any:
    """Replace the secrets in plain data. `found` collects key -> masked text."""
    if isinstance(value, Mapping):
        keys = {key: f"{path}.{key}".lstrip(".") for key in value}
        return {key: masked(each, keys[key], found) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [masked(each, path, found) for each in value]
    if not isinstance(value, str):
        return value
    whole = is_secret(path) and not _NO_SECRET.fullmatch(value)
    if (shown := _MASK if whole else mask(value)) != value and found is not None:
        found[path] = shown
    return shown
