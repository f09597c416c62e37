"""What became of random commands: counted by each process, shown once for all of them."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

PROPERTY = "tally of random configurations"
"""What a test's report carries from its process to the one that shows it."""

SHARE_TRAINED = 0.6
"""At least, of the commands whose model fits the task: else the rules refuse what would train."""


@dataclass
class Tally:
    """What became of the commands."""

    seed: int = 0
    count: int = 0
    trained: int = 0
    mended: int = 0
    """Refused commands that trained once their fixes were typed."""
    refused: Counter[str] = field(default_factory=Counter)
    """By rule; a command may break several."""
    mismatched: int = 0
    """Refused because the model has no head for the task, among other reasons perhaps."""
    failures: list[str] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Commands that trained as they were typed, of those whose model fits the task."""
        return self.trained / max(1, self.count - self.mismatched)

    def render(self) -> str:
        """The counts as a table."""
        lines = [f"{self.count} random configurations, seed {self.seed}"]
        lines += [f"{self.trained:6} trained", f"{self.mended:6} trained after their fixes"]
        lines += [f"{len(self.failures):6} failed"] if self.failures else []
        lines += [f"{self.share:6.1%} trained of those whose model fits the task"]
        each = self.refused.most_common()
        lines += [f"{times / self.count:6.1%} refused by {rule}" for rule, times in each]
        return "\n".join(lines)

    def plain(self) -> dict[str, Any]:
        """For a report, which travels between processes."""
        return asdict(self) | {"refused": dict(self.refused)}


def together(parts: Iterable[dict[str, Any]]) -> Tally | None:
    """The tally of all parts; None where nothing was tried."""
    whole: Tally | None = None
    for part in parts:
        whole = whole or Tally(seed=part["seed"])
        for name in ("count", "trained", "mended", "mismatched", "failures"):
            setattr(whole, name, getattr(whole, name) + part[name])
        whole.refused.update(part["refused"])
    return whole


def of_reports(reports: Iterable[Any]) -> Tally | None:
    """What the tests of these reports have counted."""
    properties = (each for report in reports for each in getattr(report, "user_properties", ()))
    return together(value for name, value in properties if name == PROPERTY)
