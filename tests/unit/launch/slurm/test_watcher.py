"""What a job of a cluster does: crashes, signals, budgets, wrong nodes, exit codes."""

import signal

import pytest
from unit.launch.scripted import record_for

from eke.common.errors import EkeError
from eke.launch.processes.run_dir import lock_run_folder
from eke.launch.slurm import watcher
from eke.launch.slurm.submission_file import (
    REQUEUE_CODE,
    JobEntry,
    Submission,
    read_ticket,
    write_submission,
    write_ticket,
)
from eke.launch.slurm.watcher import main, watch_run
from eke.plan.planner import read_plan, write_plan
from eke.plan.record import Outcome, read_record, start_attempt, write_record

TERM, INT, USR1, USR2 = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2

# --- a run ----------------------------------------------------------------------------------------


class Attempts:
    """In place of start_run: attempts that end as their script says."""

    def __init__(self, paths, heard) -> None:
        self.paths, self.heard = paths, heard
        self.ends: list[tuple[str, int]] = []
        self.signals: dict[int, int] = {}
        """Number of an attempt -> signal that arrives while it runs."""
        self.asked: list[int] = []
        self.started = 0
        self.changed = ""

    def __call__(self, plan, place, head):
        """Start the next one."""
        self.number = self.started
        self.started += 1
        start_attempt(self.paths, {})
        self.looks = 0
        return self

    def is_over(self) -> bool:
        """After two looks; a signal arrives at the first."""
        self.looks += 1
        if self.looks == 1 and self.number in self.signals:
            self.heard.append(self.signals[self.number])
        return self.looks > 3

    def ask(self, number: int) -> None:
        """Noted."""
        self.asked.append(number)

    exit_code = 0

    def finish(self):
        """As the script says."""
        outcome, steps = self.ends[self.number]
        record = record_for(read_plan(self.paths).run_id, outcome, steps)
        record.attempt = self.number
        write_record(self.paths, record)
        return record


@pytest.fixture
def heard():
    return []


@pytest.fixture
def attempts(paths, heard, plan, monkeypatch) -> Attempts:
    made = Attempts(paths, heard)
    write_plan(paths, plan)
    monkeypatch.setattr(watcher, "launch_attempt", made)
    monkeypatch.setattr(watcher, "POLL_S", 0)
    monkeypatch.setattr(watcher, "for_this_node", lambda plan: plan)
    monkeypatch.setattr(watcher, "note_software", lambda *_: made.changed)
    monkeypatch.setattr(watcher, "reason_of", lambda number, _: watcher_reason(number))
    return made


def watcher_reason(number: int) -> Outcome:
    """Without books: as the signal says."""
    return {TERM: Outcome.preempted, INT: Outcome.cancelled}.get(number, Outcome.timeout)


@pytest.fixture
def watch(paths, heard):
    """Watch over the run as element 0 of an array."""
    submission = Submission("eke-s-1", (str(paths.folder),), 2, 0.0, "5")
    return lambda: watch_run(paths, submission, JobEntry("/s.json", 0), heard)


@pytest.mark.parametrize(("outcome", "code"), [("ok", 0), ("oom", 1), ("diverged", 1)])
def test_final_outcome_sets_the_exit_code_and_is_not_repeated(
    outcome, code, attempts, watch
) -> None:
    attempts.ends = [(outcome, 20)]
    assert (watch(), watch()) == (code, code)
    assert attempts.started == 1


@pytest.mark.parametrize(
    ("steps", "code", "started"), [((0, 0), 1, 2), ((5, 9, 12), 0, 4)], ids=["stuck", "further"]
)
def test_crash_is_retried_once_or_while_progress_continues(
    steps, code, started, attempts, watch
) -> None:
    attempts.ends = [*(("crashed", n) for n in steps), ("ok", 20)]
    assert watch() == code
    assert attempts.started == started


@pytest.mark.parametrize(
    ("ends", "number", "code"),
    [
        pytest.param("preempted", USR2, REQUEUE_CODE, id="time limit"),
        pytest.param("preempted", TERM, REQUEUE_CODE, id="preempted"),
        pytest.param("preempted", INT, 75, id="cancelled"),
        pytest.param("crashed", TERM, 1, id="a crash after a signal"),
    ],
)
def test_interrupted_run_is_retried_or_requeued(ends, number, code, attempts, watch) -> None:
    attempts.ends, attempts.signals = [(ends, 5), ("ok", 20)], {0: number}
    assert watch() == code
    assert (attempts.started, attempts.asked) == (1, [number]), "once"


def test_run_without_progress_leaves_the_queue(attempts, watch, paths, heard) -> None:
    attempts.ends, attempts.signals = [("timeout", 0)] * 9, dict.fromkeys(range(9), USR2)
    codes = []
    while codes[-1:] != [75]:
        heard.clear()
        codes.append(watch())
    assert codes == [REQUEUE_CODE, REQUEUE_CODE, 75]
    assert read_ticket(paths).stalled == 3


def test_progress_resets_the_retry_budget(attempts, watch, paths, heard) -> None:
    attempts.ends = [("timeout", n) for n in (0, 0, 4, 4, 4)]
    attempts.signals = dict.fromkeys(range(5), USR2)
    for stalled in (1, 2, 0, 1, 2):
        heard.clear()
        assert watch() == REQUEUE_CODE
        assert read_ticket(paths).stalled == stalled


@pytest.mark.parametrize(("startup_s", "stops"), [(60.0, True), (2.0, False)])
def test_retries_that_cost_more_than_they_gain_end(
    startup_s, stops, attempts, watch, paths, heard, monkeypatch
) -> None:
    """A step of 3 s more each time: preempted so often, it would never come to an end."""
    attempts.ends = [("preempted", n) for n in range(1, 10)]
    attempts.signals = dict.fromkeys(range(9), TERM)
    write = watcher_test_write(startup_s, 3.0)
    monkeypatch.setattr(attempts, "finish", lambda: write(attempts))
    codes = []
    for _ in range(4):
        heard.clear()
        codes.append(watch())
        if codes[-1] == 75:
            break
    assert codes == ([REQUEUE_CODE, 75] if stops else [REQUEUE_CODE] * 4)
    ticket = read_ticket(paths)
    assert [list(each) for each in ticket.worths] == [[3.0, startup_s]] * 2
    assert bool(ticket.spent(2)) is stops


def watcher_test_write(startup_s: float, step_s: float):
    """An end whose record knows its times."""

    def finish(attempts):
        outcome, steps = attempts.ends[attempts.number]
        record = record_for(read_plan(attempts.paths).run_id, outcome, steps)
        record.attempt = attempts.number
        record.timing.startup_s, record.timing.train_s = startup_s, steps * step_s
        write_record(attempts.paths, record)
        return record

    return finish


def test_retry_budget_is_per_submission(attempts, watch, paths) -> None:
    write_ticket(paths, JobEntry("/other.json", 0, stalled=9))
    attempts.ends, attempts.signals = [("timeout", 0)], {0: USR2}
    assert watch() == REQUEUE_CODE


def test_wrong_node_is_recorded(attempts, watch, paths, monkeypatch, capsys) -> None:
    def refuse(plan):
        raise EkeError("planned for X, and this node has Y")

    monkeypatch.setattr(watcher, "for_this_node", refuse)
    for _ in range(3):
        start_attempt(paths, {})
    assert watch() == 1
    record = read_record(paths)
    assert (record.outcome, record.failure.message) == (
        "crashed",
        "planned for X, and this node has Y",
    )
    assert "this node has Y" in capsys.readouterr().err, "the job's output has the reason, too"
    assert record.attempt == 2, "the newest, or whoever waits for the run would not believe it"
    assert attempts.started == 0
    with lock_run_folder(paths):
        before = paths.record.stat().st_mtime_ns
        with pytest.raises(EkeError, match="is in use"):
            watch()
        assert paths.record.stat().st_mtime_ns == before


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def command(tmp_path, paths, monkeypatch):
    """Type it, as element `task`."""
    monkeypatch.setattr(watcher.signal, "signal", lambda *_: None)
    file = tmp_path / "eke-s-1.json"
    write_submission(file, Submission("eke-s-1", (str(paths.folder),), 2, 0.0, "5"))

    def run(task: str = "0", name: str = "") -> int:
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", task)
        return main([name or str(file)])

    return run


def test_watcher_finds_the_run_of_its_job(command, attempts) -> None:
    attempts.ends = [("ok", 20)]
    assert command() == 0


@pytest.mark.parametrize("task", ["1", "-1", "x", ""])
def test_missing_array_element_is_an_error(task, command, capsys) -> None:
    assert command(task) == 2
    assert f"no element {task}" in capsys.readouterr().err


def test_busy_run_is_not_started(command, paths, plan, monkeypatch, capsys) -> None:
    monkeypatch.setattr(watcher, "for_this_node", lambda plan: plan)
    write_plan(paths, plan)
    with lock_run_folder(paths):
        assert command() == 16, "not 75: nothing was interrupted"
    assert "This job leaves the run unchanged" in capsys.readouterr().err
    assert not paths.record.exists()


def test_unreadable_files_are_reported(command, paths, capsys) -> None:
    assert command(name="/nowhere.json") == 1
    assert command() == 1
    paths.record.write_text("{")
    assert command() == 1
    said = capsys.readouterr().err
    assert "not a readable submission" in said
    assert "not a readable plan" in said
    assert "not a readable record" in said
    assert main([]) == 2


def test_run_with_changed_software_is_rejected_without_retry(attempts, watch, paths) -> None:
    attempts.changed = "the software has changed since the sweep was started (torch: 1 -> 2)"
    assert watch() == 2
    record = read_record(paths)
    assert (record.outcome, record.failure.message) == ("refused", attempts.changed)
    assert attempts.started == 0
