"""How often a run of a sweep is tried again."""

import pytest
from unit.launch.scripted import record_for

from eke.launch.processes.sweep import MAX_INTERRUPTIONS, Job
from eke.plan.record import Outcome

WORTHS = [
    pytest.param(0.5, 9.0, MAX_INTERRUPTIONS, id="steps shorter than starts"),
    pytest.param(9.0, 0.5, 30, id="steps longer than starts"),
    pytest.param(1.0, None, 30, id="nobody knows what a start took"),
]


@pytest.mark.parametrize("outcome", ["preempted", "timeout", "crashed"])
@pytest.mark.parametrize(("step_s", "startup_s", "attempts"), WORTHS)
def test_one_step_per_attempt(outcome, step_s, startup_s, attempts) -> None:
    """Each attempt gets one step further, which alone would have it go on for ever."""
    job = Job(0, "a", None)
    for number in range(1, 31):
        record = record_for("a", outcome, number)
        record.timing.train_s, record.timing.startup_s = number * step_s, startup_s
        if not job.settle(record):
            break
    assert number == attempts
    if attempts < 30:
        assert job.outcome is Outcome[outcome]
        assert "5 attempts in a row" in job.reason
        assert "took 45 s to start" in job.reason


def test_long_attempt_compensates_short_attempts() -> None:
    job = Job(0, "a", None)
    trained = 0.0
    for number, seconds in enumerate([1.0, 1.0, 1.0, 1.0, 500.0, 1.0, 1.0, 1.0, 1.0], start=1):
        trained += seconds
        record = record_for("a", "preempted", number)
        record.timing.train_s, record.timing.startup_s = trained, 20.0
        assert job.settle(record), number
