"""`eke cancel|retry`: whom they ask to end, what they run again, and what they leave alone."""

import dataclasses
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from unit.launch.scripted import record_for

from eke import cli, workflows
from eke.cli import run_commands
from eke.common.errors import EkeError
from eke.common.files import try_lock
from eke.common.paths import RunPaths, SweepPaths
from eke.launch.processes.runs_table import RunStatus
from eke.launch.slurm import scheduler
from eke.launch.slurm.scheduler import Element
from eke.plan.record import read_record, start_attempt, write_record


@pytest.fixture
def make_sweep(runs):
    """sweep.json over these runs."""

    def make(*names: str, **more) -> Path:
        folder = runs / "sweep-1"
        folder.mkdir(parents=True)
        cells = [{"overrides": [f"seed={n}"], "run_id": n, "folder": ""} for n in names]
        content = {"cells": cells, "directory": str(runs.parent), "command": ["-m", "seed=1,2"]}
        (folder / "sweep.json").write_text(json.dumps({**content, **more}))
        return folder

    return make


@pytest.fixture
def typed(monkeypatch):
    """Commands that were typed again, and where."""
    found = []

    def main(command):
        found.append((list(command), os.getcwd()))
        for attempts in Path("runs").glob("*/record.*.json"):  # each run is started
            start_attempt(RunPaths(attempts.parent), {})
        return 0

    monkeypatch.setattr(workflows, "main", main)
    return found


# --- cancel ---------------------------------------------------------------------------------------


@pytest.fixture
def world(monkeypatch, runs):
    """Runs as they stand; signals and cancelled jobs are noted."""

    class World:
        def __init__(self) -> None:
            self.found: list[RunStatus] = []
            self.signals: list[tuple[int, int]] = []
            self.cancelled: list[str] = []

        def run(self, name: str, state: str = "running", pid: str = "", host: str = "here", **more):
            paths = RunPaths(runs / name)
            paths.folder.mkdir(parents=True, exist_ok=True)
            paths.lock.write_text(f"process {pid}\n" if pid else "")
            paths.attempts.write_text(json.dumps({"host": host, "pid": 1}) + "\n")
            self.found.append(RunStatus(paths, name, state, launcher="slurm", **more))

    made = World()
    monkeypatch.setattr(run_commands, "find_statuses", lambda _: made.found)
    monkeypatch.setattr(run_commands, "who_has_open", lambda _: {4711: "4711"})
    monkeypatch.setattr(run_commands.socket, "gethostname", lambda: "here")
    monkeypatch.setattr(os, "kill", lambda pid, number: made.signals.append((pid, number)))
    queue = {f"eke-s_{n}": Element("RUNNING", "n1", "eke-s", "", (f"5_{n}",)) for n in range(2)}
    monkeypatch.setattr(scheduler, "queue", lambda: queue)
    monkeypatch.setattr(
        scheduler, "cancel", lambda jobs: made.cancelled.extend(n for job in jobs for n in job.ids)
    )
    return made


def test_cancel_signals_a_local_sweep_once(world, capsys) -> None:
    world.run("z", "ok")
    assert cli.main(["cancel", "runs"]) == 0
    assert capsys.readouterr().out == "no run is queued or running\n"
    for name in "abc":
        world.run(name, pid="4711", where="process 9 on jobserver")
    assert cli.main(["cancel", "runs"]) == 0
    assert world.signals == [(4711, signal.SIGINT)]
    assert world.cancelled == []
    assert capsys.readouterr().out == "asked 3 runs to save and end\n"


def test_cancelled_runs_are_listed_as_json(world, capsys) -> None:
    world.run("a", pid="4711")
    world.run("b", "waiting")
    assert cli.main(["cancel", "runs", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [Path(each).name for each in found["asked"]] == ["a"]
    assert (found["waiting"], found["not_stopped"]) == (1, [])


def test_jobs_are_cancelled_in_one_call(world, capsys) -> None:
    world.run("a", where="n1, job 5_0", job="eke-s_0", pid="77", host="n1")
    world.run("b", "queued", where="job 5_1", job="eke-s_1")
    world.found.append(dataclasses.replace(world.found[1], label="the same run"))
    world.run("c", pid="4711")
    assert cli.main(["cancel", "runs"]) == 0
    assert (world.cancelled, world.signals) == (["5_0", "5_1"], [(4711, signal.SIGINT)])
    assert capsys.readouterr().out == "asked 3 runs to save and end\n"


@pytest.mark.parametrize(
    ("run", "said"),
    [
        pytest.param({"pid": "4711", "host": "there"}, "4711 runs on there", id="host"),
        pytest.param({"pid": "x"}, "process x has ended", id="no number"),
        pytest.param({"pid": "4712"}, "process 4712 has ended", id="another's by now"),
    ],
)
def test_cancel_reports_unreachable_process(run, said, world, capsys) -> None:
    world.run("a", **run)
    assert cli.main(["cancel", "runs"]) == 1
    assert world.signals == []
    out = capsys.readouterr().out
    assert out.startswith("asked 0 runs to save and end\n")
    assert said in out


@pytest.mark.parametrize(
    ("visible", "asked", "said"),
    [
        pytest.param({9000: "1", 9001: "7"}, 9000, "asked 1 run to save", id="seen from outside"),
        pytest.param({}, None, "process 1 holds", id="beside it"),
        pytest.param({9001: "7"}, None, "has ended", id="only its worker"),
    ],
)
def test_supervisor_in_another_pid_namespace_is_not_signalled(
    visible, asked, said, world, monkeypatch, capsys
) -> None:
    """Process 1 of a container: here 1 is another process."""
    monkeypatch.setattr(run_commands, "who_has_open", lambda _: visible)
    world.run("a", pid="1")
    with open(world.found[0].paths.lock) as lock:
        assert try_lock(lock.fileno())
        assert cli.main(["cancel", "runs"]) == (0 if asked else 1)
    assert world.signals == ([(asked, signal.SIGINT)] if asked else [])
    assert said in (out := capsys.readouterr().out)
    assert ("eke cancel" in out) == (not visible)


def test_pid_1_of_two_containers_is_distinguished(world, monkeypatch, capsys) -> None:
    found = {"a": {9000: "1"}, "b": {9100: "1"}, "c": {9100: "1"}}
    monkeypatch.setattr(run_commands, "who_has_open", lambda lock: found[lock.parent.name])
    for name in found:
        world.run(name, pid="1")
    assert cli.main(["cancel", "runs"]) == 0
    assert world.signals == [(9000, signal.SIGINT), (9100, signal.SIGINT)]
    assert capsys.readouterr().out == "asked 3 runs to save and end\n"


def test_unanswered_cluster_is_reported(world, monkeypatch, capsys) -> None:
    def fail(elements) -> None:
        raise EkeError("scancel gave no answer")

    monkeypatch.setattr(scheduler, "cancel", fail)
    world.run("a", pid="4711")
    world.run("b", "queued", job="eke-s_1")
    assert cli.main(["cancel", "runs"]) == 1
    assert capsys.readouterr().out == (
        "asked 1 run to save and end\n1 run may still be running: scancel gave no answer\n"
    )


def test_jobs_unknown_to_slurm_are_not_cancelled(world, capsys) -> None:
    """What SLURM was silent about may wait or run: it is no success that nothing was found."""
    world.run("a", "unknown", silent="squeue: no controller")
    world.found.append(dataclasses.replace(world.found[0], label="the same run"))
    assert cli.main(["cancel", "runs"]) == 1
    assert world.cancelled == []
    told = "not stopped: 1 run with a job that may wait or run: squeue: no controller\n"
    assert capsys.readouterr().out == told
    world.run("b", pid="4711", silent="squeue: no controller")  # on this machine, by its lock
    assert cli.main(["cancel", "runs"]) == 1
    assert world.signals == [(4711, signal.SIGINT)]
    assert capsys.readouterr().out == f"asked 1 run to save and end\n{told}"


def test_status_reports_unanswered_queue(world, capsys) -> None:
    world.run("a", "unknown", where="job 5_0", silent="squeue: no controller")
    world.run("b", "ok")
    assert cli.main(["status", "runs"]) == 1
    out = capsys.readouterr().out
    assert "slurm does not answer: squeue: no controller" in out
    assert "unknown: the jobs of 1 run" in out
    assert cli.main(["status", "--json", "runs"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [each["silent"] for each in found] == ["squeue: no controller", ""]
    world.found.pop(0)
    assert cli.main(["status", "runs"]) == 0


@contextmanager
def watched(sweep: SweepPaths, host: str = "here", process: int = 4711) -> Iterator[None]:
    """Somebody watches over a sweep."""
    with open(sweep.watcher(host, process), "w") as lock:
        assert try_lock(lock.fileno())
        yield


@pytest.mark.parametrize(
    ("states", "said"),
    [
        pytest.param(["waiting", "waiting"], "2 runs will not start", id="nothing has started"),
        pytest.param(["ok"], "asked the sweep to end", id="between two trials"),
        pytest.param(
            ["running", "waiting"],
            "asked 1 run to save and end, 1 run will not start",
            id="running",
        ),
    ],
)
def test_cancel_signals_the_supervisor_of_a_sweep_once(
    states, said, world, make_sweep, capsys
) -> None:
    sweep = SweepPaths(make_sweep("1", "2"))
    for name, state in enumerate(states):
        world.run(str(name), state, pid="4711" if state == "running" else "")
    with watched(sweep):
        assert cli.main(["cancel", str(sweep.folder)]) == 0
    assert world.signals == [(4711, signal.SIGINT)]
    assert capsys.readouterr().out == f"{said}\n"


def test_cancel_signals_every_supervisor_of_a_sweep(world, runs, make_sweep, monkeypatch) -> None:
    """The sweep was typed twice: the second waits for the runs of the first."""
    monkeypatch.setattr(run_commands, "who_has_open", lambda _: {4711: "4711", 4712: "4712"})
    sweep = SweepPaths(make_sweep("1"))
    world.run("1", pid="4711")
    with watched(sweep), watched(sweep, process=4712):
        assert cli.main(["cancel", str(sweep.folder)]) == 0
    assert world.signals == [(4711, signal.SIGINT), (4712, signal.SIGINT)]


@pytest.mark.parametrize("waits", [False, True])
def test_cancel_lets_a_supervisor_wait_for_its_jobs(waits, world, make_sweep) -> None:
    sweep = SweepPaths(make_sweep("1", "2"))
    world.run("1", "queued", job="eke-s_0")
    if waits:
        world.run("2", "waiting")
    with watched(sweep):
        assert cli.main(["cancel", str(sweep.folder)]) == 0
    assert world.signals == ([(4711, signal.SIGINT)] if waits else [])


@pytest.mark.parametrize("elsewhere", [False, True])
def test_cancel_signals_the_submitter_before_its_jobs(
    elsewhere, world, make_sweep, monkeypatch, capsys
) -> None:
    sweep = SweepPaths(make_sweep("1", "2"))
    world.run("1", "queued", job="eke-s_0")
    world.run("2", "waiting")
    order = world.cancelled
    monkeypatch.setattr(os, "kill", lambda pid, _: order.append(pid))
    with watched(sweep, "there" if elsewhere else "here"):
        code = cli.main(["cancel", str(sweep.folder)])
    out = capsys.readouterr().out
    if elsewhere:
        assert (code, order) == (1, ["5_0"])
        assert out.splitlines()[1] == "process 4711 runs on there. Cancel it there"
    else:
        assert (code, order) == (0, [4711, "5_0"])
        assert out == "asked 1 run to save and end, 1 run will not start\n"


# --- retry ----------------------------------------------------------------------------------------


def test_retry_renames_failed_records_and_repeats_the_sweep(
    make_run, make_sweep, typed, runs, monkeypatch, capsys
) -> None:
    made = {
        n: make_run(n, o)
        for n, o in zip("1234", ("ok", "oom", "crashed", "preempted"), strict=True)
    }
    folder = make_sweep(*made, "2")  # two cells may be one run
    monkeypatch.chdir(runs)
    assert cli.main(["retry", "sweep-1"]) == 0
    assert typed == [(["-m", "seed=1,2"], str(runs.parent))]
    place, count = capsys.readouterr().err.splitlines()
    assert count == "rerunning 2 runs"
    assert place.startswith(f"in {runs.parent}: ")
    assert place.endswith(" -m seed=1,2")
    assert [read_record(made[n]) is None for n in "1234"] == [False, True, True, False]
    kept = made["2"].folder / "record.1.json"
    assert json.loads(kept.read_text())["outcome"] == "oom"
    assert folder.exists()


def test_retry_keeps_every_earlier_record(make_run, make_sweep, typed) -> None:
    paths, folder = make_run("1"), make_sweep("1")
    for steps in range(4):
        write_record(paths, record_for("1", "diverged", steps))
        assert cli.main(["retry", str(folder)]) == 0
    kept = sorted(paths.folder.glob("record.*.json"))
    assert [json.loads(path.read_text())["steps_done"] for path in kept] == [0, 1, 2, 3]


def test_retry_only_skips_other_outcomes_and_unreadable_records(
    make_run, make_sweep, typed, capsys
) -> None:
    made = [make_run("1", "oom"), make_run("2", "crashed"), make_run("3")]
    made[2].record.write_text('{"outcome": "o')
    folder = make_sweep("1", "2", "3")
    assert cli.main(["retry", "--only", "diverged", str(folder)]) == 0
    assert capsys.readouterr().out == "no run is diverged\n"
    assert cli.main(["retry", "--only", "oom", str(folder)]) == 0
    assert [paths.record.exists() for paths in made] == [False, True, True]
    assert len(typed) == 1
    assert cli.main(["retry", str(folder)]) == 0
    assert (made[2].folder / "record.1.json").read_text() == '{"outcome": "o'


def test_retry_reruns_runs_without_a_record(make_run, make_sweep, typed, capsys) -> None:
    make_run("1")
    cell = {"overrides": ["seed=1"], "folder": "", "outcome": "crashed", "reason": "no room"}
    unplanned = {**cell, "overrides": ["seed=2"], "run_id": ""}
    cells = [{**cell, "run_id": "1"}, unplanned, {**unplanned, "overrides": ["seed=3"]}]
    folder = make_sweep(cells=cells)
    assert cli.main(["status", str(folder)]) == 0
    assert "refused" not in capsys.readouterr().out
    assert cli.main(["retry", str(folder)]) == 0
    assert capsys.readouterr().err.endswith("rerunning 3 runs\n")
    assert len(typed) == 1


@pytest.mark.parametrize("runs_at", ["runs", "{here}", "/elsewhere/runs"])
def test_retry_does_not_change_a_copied_sweep(
    runs_at, make_run, make_sweep, runs, typed, capsys
) -> None:
    """Its command would run in the place that it was typed for, where nothing is set aside."""
    paths = make_run("1", "crashed")
    cell = {"overrides": ["seed=1"], "run_id": "1", "folder": runs_at.format(here=runs) + "/1"}
    code = cli.main(["retry", str(make_sweep(cells=[cell]))])
    is_copy = runs_at.startswith("/elsewhere")
    assert (code, paths.record.exists(), len(typed)) == ((1, True, 0) if is_copy else (0, False, 1))
    told = capsys.readouterr().err
    assert (f"paths.runs={runs}" in told.split()) is is_copy


@pytest.mark.parametrize("ended", [2, 75, KeyboardInterrupt], ids=str)
def test_retry_restores_records_if_the_command_fails(
    ended, make_run, make_sweep, monkeypatch, capsys
) -> None:
    made = [make_run("1", "oom"), make_run("2", "crashed"), make_run("3")]

    def refused(_) -> int:
        if isinstance(ended, int):
            return ended
        raise ended

    monkeypatch.setattr(workflows, "main", refused)
    code = cli.main(["retry", str(make_sweep("1", "2", "3"))])
    assert code == (ended if isinstance(ended, int) else 75)
    assert capsys.readouterr().err.endswith("no run was started, 2 records restored\n")
    assert [paths.record.exists() for paths in made] == [True, True, False]
    assert not list(made[0].folder.parent.glob("*/record.*.json"))


def test_retry_restores_no_record_once_a_run_started(
    make_run, make_sweep, monkeypatch, capsys
) -> None:
    made = [make_run("1", "oom"), make_run("2", "crashed")]
    monkeypatch.setattr(workflows, "main", lambda _: start_attempt(made[0], {}) or 75)
    assert cli.main(["retry", str(make_sweep("1", "2"))]) == 75
    assert not [paths for paths in made if paths.record.exists()]
    assert "restored" not in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["run", "runs", "nowhere"])
def test_retry_rejects_folder_without_sweep(kind, make_run, runs, typed, capsys) -> None:
    paths = make_run("1", "crashed")
    folder = {"run": paths.folder, "runs": runs, "nowhere": runs / "nowhere"}[kind]
    assert cli.main(["retry", str(folder)]) == 2
    told = capsys.readouterr().err
    assert "DIR = " in told
    fix = "rerun=true\n" if kind == "run" else "-> eke retry runs/sweep-ID"
    assert fix in told
    assert paths.record.exists()


@pytest.mark.parametrize(
    "more",
    [{"directory": "/nowhere/at/all"}, {"command": []}, {"command": ["python", "train.py"]}],
    ids=["directory", "nothing typed", "of an older eke"],
)
def test_retry_without_a_command_keeps_records(more, make_run, make_sweep, typed, capsys) -> None:
    paths = make_run("1", "crashed")
    assert cli.main(["retry", str(make_sweep("1", **more))]) == 1
    assert capsys.readouterr().err
    assert paths.record.exists()
    assert typed == []
