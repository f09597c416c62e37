"""Names that exist only to be refused: other tools' spellings and retired techniques.

Two tables, read by did-you-mean. A name that has become a key or an option of eke's own has no row
here (tested), and the override that each row proposes composes and sets what was meant (tested).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from eke.config.compose.formatting import normal
from eke.config.compose.paths_and_names import as_data, as_evaluation
from eke.config.foreign_names.keys import KEYS
from eke.config.foreign_names.options import OPTIONS
from eke.config.foreign_names.phrases import OWNERS


@dataclass(frozen=True)
class Retired:
    """Why a name is refused, and what to type instead."""

    name: str
    """As it is typed elsewhere."""
    reason: str
    """A clause that follows the name: what it is, or why it is gone; empty for eke's own name."""
    fix: str
    """The override to type, empty where eke has nothing that does the same; `{value}` stands for
    the value that was typed, `{whole}` for a whole number alone, `{0}` and `{1}` for its items,
    `{items}` for all of them, `{data}` and `{eval_data}` for what reads a file of this name."""
    by_value: Mapping[str, str] = field(default_factory=dict)
    """Overrides for particular values, in lower case (`true`, `false`: also for 1, 0, yes, no)."""
    owner: str = ""
    """The tool whose name it is; empty for several tools' and for nobody's in particular."""

    def overrides(self, value: str) -> tuple[str, ...]:
        """What to type instead to get what `value` asked for; empty where nothing does."""
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
        # Split before the value goes in: it may hold spaces.
        return tuple(
            re.sub(r"\{(\w+)\}", lambda match: known[match[1]], part) for part in fix.split()
        )

    def why(self, value: str) -> str:
        """The reason, and for a name of another tool whose it is and eke's name."""
        typed = self.overrides(value)
        if self.reason:
            why = self.reason if typed else f"{self.reason}; leave it out"
            return f"{why} ({self.owner}'s name)" if self.owner else why
        if "=" in self.name:
            return f"is called {self.fix.partition('=')[2]} here"
        fix = _PLACES.get(self.fix, self.fix).split()
        keys = [override.partition("=")[0] for override in typed or fix]
        own = next((key for key in reversed(keys) if "." in key), keys[-1])
        why = f"is {self.owner or 'another tool'}'s name; eke's is {own}"
        return why if typed else f"{why}, which takes no {value}"


_PLACES = {"{data}": "data.path", "{eval_data}": "data.eval_path"}
_FILES = {"{data}": as_data, "{eval_data}": as_evaluation}
# as typed -> as it is looked up in by_value
_BOOLEANS = {"1": "true", "yes": "true", "on": "true", "0": "false", "no": "false", "off": "false"}


def _rows() -> Iterator[Retired]:
    for names, reason, fix, *by_value in (*KEYS, *OPTIONS):
        for word in names.split():
            owner, _, name = word.rpartition(":")
            values: dict[str, str] = by_value[0] if by_value else {}
            yield Retired(name, reason, fix, values, OWNERS.get(owner, ""))


RETIRED = {row.name: row for row in _rows()}
"""Key path, or `group=option`, exactly as typed elsewhere -> why not here, and what instead."""


def find_retired(name: str) -> Retired | None:
    """The row of a key path or of `group=option`, whatever its case and dashes."""
    if name in RETIRED:
        return RETIRED[name]
    wanted = normal(name)
    return next((row for known, row in RETIRED.items() if normal(known) == wanted), None)
