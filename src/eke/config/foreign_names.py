"""Names from other tools (`foreign_names.yaml`) with eke's equivalents, for error messages."""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from eke.common.text import normalize_name
from eke.config.compose.suggest import as_evaluation, suggest_data_overrides

_FILES = {"{data}": suggest_data_overrides, "{eval_data}": as_evaluation}
_FILE_KEYS = {"{data}": "data.path", "{eval_data}": "data.eval_path"}
_BOOLEANS = {"1": "true", "yes": "true", "on": "true", "0": "false", "no": "false", "off": "false"}


@dataclass(frozen=True)
class Retired:
    """Name from another tool, with the reason for rejecting it and the fix."""

    name: str
    """Key path or `group=option` in other tools."""
    reason: str
    """Text after the name in messages. Empty if eke has the same under another name."""
    fix: str
    """Overrides to use instead, with the YAML file's placeholders. Empty if there are none."""
    by_value: Mapping[str, str] = field(default_factory=dict)
    """Overrides for particular values in lower case. `true` and `false` also match 1, 0, yes and
    no."""
    owner: str = ""
    """Tool that uses this name. Empty if several tools do."""

    def overrides(self, value: str) -> tuple[str, ...]:
        """Return the overrides equivalent to `value` in the other tool, or none."""
        plain = value.strip("\"'").lower()
        boolean = _BOOLEANS.get(plain, plain)
        fix = self.by_value.get(plain, self.by_value.get(boolean, self.fix))
        if fix in _FILES:
            return _FILES[fix](value)
        items = [item.strip() for item in value.strip("[]()").split(",")]
        whole = all(item.isdecimal() for item in items)
        if ("{1}" in fix and len(items) != 2) or ("{whole}" in fix and not whole):
            return ()
        known = {"value": value, "whole": value, "name": self.name, "items": ",".join(items)}
        known |= {str(number): item for number, item in enumerate(items)}
        # Split before inserting the value, which may contain spaces.
        return tuple(
            re.sub(r"\{(\w+)\}", lambda match: known[match[1]], part) for part in fix.split()
        )

    def why(self, value: str) -> str:
        """Return the reason, with the other tool and eke's name."""
        typed = self.overrides(value)
        if self.reason:
            why = f"{self.reason} ({self.owner}'s name)" if self.owner else self.reason
            return why if typed else f"{why}. Remove it"
        if "=" in self.name:
            return f"unknown option. In eke it is {self.fix.partition('=')[2]}"
        fix = _FILE_KEYS.get(self.fix, self.fix).split()
        keys = [override.partition("=")[0] for override in typed or fix]
        own = next((key for key in reversed(keys) if "." in key), keys[-1])
        origin = f"is a key of {self.owner}" if self.owner else "unknown key"
        why = f"{origin}. In eke it is {own}"
        return why if typed else f"{why}, which does not accept {value}"


@functools.cache
def retired_names() -> Mapping[str, Retired]:
    """Read all rows, by name."""
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    # The C loader takes 3 ms, Python's 60 ms. Some builds of PyYAML do not have it.
    tables = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    found = {}
    for row in (*tables["keys"], *tables["options"]):
        reason, values = row.pop("reason", ""), row.pop("values", {})
        for fix, names in row.items():
            for word in names.split():
                owner, _, name = word.rpartition(":")
                typed = "" if fix == "none" else fix
                found[name] = Retired(name, reason, typed, values, tables["owners"].get(owner, ""))
    return found


def find_retired(name: str) -> Retired | None:
    """Return the row of a key path or `group=option`. Case and dashes are ignored."""
    rows = retired_names()
    if name in rows:
        return rows[name]
    wanted = normalize_name(name)
    return next((row for known, row in rows.items() if normalize_name(known) == wanted), None)
