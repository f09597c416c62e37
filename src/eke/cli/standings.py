"""What the table of runs and its live view say alike."""

from collections import Counter
from collections.abc import Sequence

from eke.launch.standing import Standing
from eke.units import format_number


def own_words(standings: Sequence[Standing]) -> list[str]:
    """What was typed for each run, without the words that all of several have."""
    typed = [each.label.split() for each in standings]
    shared = set.intersection(*map(set, typed)) if len(typed) > 1 else set()
    return [" ".join(word for word in words if word not in shared) for words in typed]


def counted(standings: Sequence[Standing]) -> str:
    """How many runs there are, and how many are where: `3 runs: 2 ok, 1 running`."""
    counts = Counter(each.state for each in standings)
    total = ", ".join(f"{count} {state}" for state, count in counts.most_common())
    return f"{format_number(len(standings), 'run')}: {total}"
