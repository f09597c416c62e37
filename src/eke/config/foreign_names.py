"""Names from other tools (`foreign_names.yaml`), each with eke's equivalent, for error messages."""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from eke.common.text import normal
from eke.config.compose.suggest import as_data, as_evaluation

_FILES = {"{data}": as_data, "{eval_data}": as_evaluation}
_FILE_KEYS = {"{data}": "data.path", "{eval_data}": "data.eval_path"}
_BOOLEANS = {"1": "true", "yes": "true", "on": "true", "0": "false", "no": "false", "off": "false"}


@dataclass(frozen=True)
class Retired:
    """A name from another tool, the reason for rejecting it, and its fix."""

    name: str
    """Key path or `group=option` in other tools."""
    reason: str
    """Follows the name in messages; empty if eke has the same under another name."""
    fix: str
    """The overrides to use instead, with placeholders (see the YAML file); empty without any."""
    by_value: Mapping[str, str] = field(default_factory=dict)
    """Overrides for particular values, in lower case (`true`, `false`: also for 1, 0, yes, no)."""
    owner: str = ""
    """The tool that uses this name; empty if several do."""

    def overrides(self, value: str) -> tuple[str, ...]:
        """Overrides equivalent to `value` in the other tool; empty if there are none."""
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
        """The reason, with the other tool and eke's own name."""
        typed = self.overrides(value)
        if self.reason:
            why = self.reason if typed else f"{self.reason}; remove it"
            return f"{why} ({self.owner}'s name)" if self.owner else why
        if "=" in self.name:
            return f"is called {self.fix.partition('=')[2]} here"
        fix = _FILE_KEYS.get(self.fix, self.fix).split()
        keys = [override.partition("=")[0] for override in typed or fix]
        own = next((key for key in reversed(keys) if "." in key), keys[-1])
        why = f"is {self.owner or 'another tool'}'s name; eke's is {own}"
        return why if typed else f"{why}, which takes no {value}"


@functools.cache
def retired_names() -> Mapping[str, Retired]:
    """All rows by name."""
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    # The C loader takes 3 ms, Python's 60; some builds of PyYAML lack it.
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
    """The row of a key path or `group=option`, ignoring case and dashes."""
    rows = retired_names()
    if name in rows:
        return rows[name]
    wanted = normal(name)
    return next((row for known, row in rows.items() if normal(known) == wanted), None)
