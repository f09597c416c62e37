"""What the table of runs and its live view say alike."""

from collections import Counter
from collections.abc import Sequence

from eke.common.text import format_number
from eke.launch.processes.status import NO_FOLDER, Standing
from eke.plan.record import Outcome


def own_words(standings: Sequence[Standing]) -> list[str]:
    """What was typed for each run, without the words that all of several have."""
    typed = [each.label.split() for each in standings]
    shared = set.intersection(*map(set, typed)) if len(typed) > 1 else set()
    return [" ".join(word for word in words if word not in shared) for words in typed]


def run_name(each: Standing) -> str:
    """Its folder's name; empty for a cell that has none, since no run can be, or not yet."""
    has_none = each.state == Outcome.refused.name or each.paths.folder.name == NO_FOLDER
    return "" if has_none else each.paths.folder.name


def counted(standings: Sequence[Standing]) -> str:
    """How many runs there are, and how many are where: `3 runs: 2 ok, 1 running`."""
    counts = Counter(each.state for each in standings)
    total = ", ".join(f"{count} {state}" for state, count in counts.most_common())
    return f"{format_number(len(standings), 'run')}: {total}"


def silence(standings: Sequence[Standing]) -> str:
    """What is unknown because a launcher does not answer; empty if all do."""
    silent = {each.paths.folder: each for each in standings if each.silent}
    if not silent:
        return ""
    first = next(iter(silent.values()))
    return (
        f"\n{first.launcher} does not answer: {first.silent}\n"
        f"not seen: what it does with the jobs of {format_number(len(silent), 'run')}; all else is"
        " what the runs' own files say"
    )
