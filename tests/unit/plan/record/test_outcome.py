"""Outcomes, and the exit codes that scripts and schedulers go by."""

import pytest

from eke.plan.record import Outcome

TABLE = {
    "ok": (0, True),
    "oom": (1, True),
    "diverged": (1, True),
    "timeout": (75, False),
    "preempted": (75, False),
    "crashed": (1, False),
    "cancelled": (75, False),
    "refused": (2, False),
    "skipped": (1, False),
}
"""Outcome -> exit code of the process that reports it, and whether running again repeats it."""


@pytest.mark.parametrize(("name", "expected"), TABLE.items(), ids=TABLE.keys())
def test_exit_code_of_every_outcome(name, expected) -> None:
    outcome = Outcome(name)
    assert (outcome.exit_code, outcome.is_final) == expected
    assert Outcome[name] is outcome, "names and values are the same word"


def test_outcomes_are_a_closed_set() -> None:
    assert {outcome.value for outcome in Outcome} == set(TABLE)
