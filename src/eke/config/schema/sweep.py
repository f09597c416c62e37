"""Schema of a sweep: which runs `-m` makes. It is part of none of them."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from eke.config.schema.limits import at_least


class Seeds(Enum):
    """Whether the repeats of a configuration share their seed."""

    same = "same"
    per_repeat = "per_repeat"


@dataclass
class Sweep:
    """Which runs `-m` makes: rows x zip x product, less what is excluded, in rounds of repeats."""

    product: dict[str, Any] = field(default_factory=dict)
    """Key -> its values, as a list or as typed behind -m; every combination is a run."""
    rows: dict[str, Any] = field(default_factory=dict)
    """Name -> the overrides of that row, a mapping; the name is shown with the run."""
    zip: dict[str, Any] = field(default_factory=dict)
    """Key -> its values, advanced together: all lists are of one length."""
    exclude: list[str] = field(default_factory=list)
    """Expressions such as `precision=fp16 and model=tiny_t5`; a run that one is true of is left
    out."""
    repeats: int = field(default=1, metadata=at_least(1))
    """Runs of each configuration, one of every configuration per round: repeat=0, 1, ..."""
    seeds: Seeds = Seeds.same
    """`per_repeat`: repeat=0, 1, ... have seed=0, 1, ..., so that three repeats resolve differences
    of the loss; `same`: the repeats of a configuration are one training, timed again."""
    strict: bool = False
    """Start nothing when a rule refuses any of the runs."""
