"""Names that exist only to be refused: other tools' spellings and retired techniques.

Two tables, read by did-you-mean. A name that has become a key or an option of eke's own has no row
here (tested), and the override that each row proposes is one that composes today (tested).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from eke.compose.retired.keys import KEYS
from eke.compose.retired.options import OPTIONS
from eke.compose.wording import normal


@dataclass(frozen=True)
class Retired:
    """Why a name is refused, and what to type instead."""

    why: str
    """A clause that follows the name: what it is, or why it is gone."""
    fix: str
    """The override to type; `{value}` stands for the value that was typed."""
    by_value: Mapping[str, str] = field(default_factory=dict)
    """Overrides for particular values, in lower case (`true`, `false`: also for 1, 0, yes, no)."""

    def overrides(self, value: str) -> tuple[str, ...]:
        """What to type instead to get what `value` asked for."""
        lowered = value.strip("\"'").lower()
        lowered = _BOOLEANS.get(lowered, lowered)
        # Split before the value goes in: it may hold spaces.
        parts = self.by_value.get(lowered, self.fix).split()
        return tuple(part.replace("{value}", value) for part in parts)


# as typed -> as it is looked up in by_value
_BOOLEANS = {"1": "true", "yes": "true", "on": "true", "0": "false", "no": "false", "off": "false"}

RETIRED: dict[str, Retired] = {
    name: Retired(*row) for names, *row in (*KEYS, *OPTIONS) for name in names.split()
}
"""Key path, or `group=option`, exactly as typed elsewhere -> why not here, and what instead."""


def find_retired(name: str) -> Retired | None:
    """The row of a key path or of `group=option`, whatever its case and dashes."""
    if name in RETIRED:
        return RETIRED[name]
    wanted = normal(name)
    return next((row for known, row in RETIRED.items() if normal(known) == wanted), None)
