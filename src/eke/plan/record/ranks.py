"""What the processes of one run leave about their end, beside the record of rank 0."""

import contextlib
from dataclasses import asdict, dataclass

import cattrs

from eke.common.files import read_json, write_json
from eke.common.paths import RunPaths
from eke.plan.record.outcome import Outcome
from eke.plan.record.record import Failure


@dataclass(frozen=True)
class RankFailure:
    """How a process other than rank 0 failed, in its own words."""

    attempt: int
    rank: int
    outcome: str
    failure: Failure


@dataclass(frozen=True)
class DeadRank:
    """The process that ended first, as its parent saw it: it could not say anything itself."""

    attempt: int
    rank: int
    exit_code: int
    """Negative for a signal, as in Python's subprocess."""
    node: int = 0
    """Number of its machine."""


def write_rank_failure(
    paths: RunPaths, attempt: int, rank: int, outcome: Outcome, failure: Failure
) -> None:
    """Write it atomically; a disk that takes nothing any more takes nothing here either."""
    content = RankFailure(attempt, rank, outcome.name, failure)
    with contextlib.suppress(OSError):
        write_json(paths.rank_failure(rank), asdict(content))


def write_dead_rank(paths: RunPaths, dead: DeadRank) -> None:
    """Write it atomically, like the above."""
    with contextlib.suppress(OSError):
        write_json(paths.dead_rank(dead.node), asdict(dead))


def read_rank_failures(paths: RunPaths, attempt: int) -> list[RankFailure]:
    """What the processes of this attempt left, lowest rank first; unreadable ones are passed by."""
    found = []
    for path in paths.folder.glob(paths.rank_failure(0).name.replace("0", "*")):
        with contextlib.suppress(OSError, ValueError, cattrs.BaseValidationError):
            failure = cattrs.structure(read_json(path), RankFailure)
            Outcome(failure.outcome)  # a ValueError for a word that is none
            if failure.attempt == attempt:
                found.append(failure)
    return sorted(found, key=lambda each: each.rank)


def read_dead_rank(paths: RunPaths, attempt: int) -> DeadRank | None:
    """The first process of this attempt to end, where somebody saw it.

    Of several machines, each of which has seen one, the one that a signal killed, else one that is
    not rank 0: those who are left behind fail with an ordinary exit code.
    """
    found = []
    for path in paths.folder.glob(f"{paths.dead_rank().stem}*.json"):
        with contextlib.suppress(OSError, ValueError, cattrs.BaseValidationError):
            found.append(cattrs.structure(read_json(path), DeadRank))
    mine = [dead for dead in found if dead.attempt == attempt]
    return min(mine, key=lambda d: (d.exit_code >= 0, d.rank == 0, d.rank), default=None)
