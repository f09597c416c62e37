"""Rounds of sweep.repeats=auto with made-up records: what runs next, what stays decided."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from unit.results.report.made import Run, make_record

from eke.config.compose import compose
from eke.config.schema import Sweep
from eke.launch.interface import Launcher, StartedSweep
from eke.launch.processes.status import open_rows
from eke.launch.processes.sweep import Job, SweepFile, SweepRun, sweep_paths
from eke.plan.record import EXIT_OK, EXIT_RESUMABLE, EXIT_USER, Outcome
from eke.results.report.compare.until_decided import RowDecision, State
from eke.workflows import rounds as rounds_module
from eke.workflows.rounds import Rounds, find_repeat_problems
from eke.workflows.sweep import run_planned_sweep

OPTIMIZERS = ("adamw", "adafactor", "sgd", "lion", "muon", "adamw_8bit")


class World:
    """A machine: factor of the speed of each optimizer, noise, and runs that fail."""

    def __init__(self, folder, factors, noise=0.005, seed=1, **settings) -> None:
        self.factors = dict(zip(OPTIMIZERS, factors, strict=False))
        self.noise, self.paths = noise, sweep_paths(str(folder), "a")
        self.settings = Sweep(repeats="auto", **settings)
        self.fails: dict[str, Outcome] = {}
        self.records: dict[tuple[str, int], object] = {}
        self.made: list[tuple[str, int]] = []
        self._random = np.random.default_rng(seed)

    def rounds(self, **changed) -> Rounds:
        """What a command makes of it."""
        settings = Sweep(**{**vars(self.settings), **changed})
        cells, jobs = [], []
        for repeat in range(settings.max_repeats):
            for name in self.factors if repeat % 2 == 0 else reversed(self.factors):
                typed = (f"optimizer={name}", f"repeat={repeat}")
                plan = SimpleNamespace(config=SimpleNamespace(repeat=repeat, rerun=False))
                jobs.append(Job(len(cells), name, plan))
                cells.append(SweepRun(typed, run_id="x", round=repeat))
        file = SweepFile(self.paths, ["-m"], cells[: len(self.factors)])
        return Rounds(file, cells, jobs, settings)

    def do(self, rounds: Rounds, kill_at: tuple[str, int] | None = None) -> Rounds:
        """Run it to its end, or until it is killed."""
        for batch in rounds:
            for job in batch:
                key = job.label, job.plan.config.repeat
                if key == kill_at:
                    return rounds
                self._run(job, key)
        return rounds

    def _run(self, job: Job, key: tuple[str, int]) -> None:
        name, repeat = key
        job.reused = key in self.records
        if not job.reused and name in self.fails:
            job.end(self.fails[name])
            return
        if not job.reused:
            self.made.append(key)
            noise = float(np.exp(self.noise * self._random.normal()))
            run = Run({"optimizer": name}, repeat, speed=100 * self.factors[name] * noise)
            self.records[key] = make_record("x", run)
        job.record = self.records[key]
        job.end(Outcome.ok)

    def stored(self) -> dict:
        return json.loads(self.paths.sweep.read_text())["repeats"]

    def states(self) -> dict[str, str]:
        """Optimizer -> state in the sweep's file."""
        rows = self.stored()["rows"]
        return {row["overrides"][0].partition("=")[2]: row["state"] for row in rows}

    def repeats(self) -> dict[str, int]:
        return {name: sum(key[0] == name for key in self.made) for name in self.factors}


def test_decided_rows_stop_and_the_baseline_continues(tmp_path) -> None:
    world = World(tmp_path, [1, 1.3, 0.8, 1.0, 1.04], noise=0.015)
    rounds = world.do(world.rounds())
    found = world.states()
    assert (found["adafactor"], found["sgd"], found["lion"]) == ("higher", "lower", "same")
    repeats = world.repeats()
    assert repeats["adafactor"] == repeats["sgd"] == 3
    assert repeats["adamw"] == max(repeats.values()) > 3
    assert len(set(world.made)) == len(world.made) == len(rounds.jobs)
    assert world.stored()["level"] == 0.015
    assert rounds.is_over


def test_killed_sweep_resumes_with_its_decisions(tmp_path) -> None:
    world = World(tmp_path, [1, 1.3, 0.8, 1.02, 1.05], noise=0.01)
    world.do(world.rounds(), kill_at=("sgd", 2))
    assert world.stored()["rounds"] == 2
    assert not world.stored()["rows"]
    world.do(world.rounds(), kill_at=("muon", 4))
    before = {k: v for k, v in world.states().items() if v != "open"}
    assert before["adafactor"] == "higher"
    kept = [row for row in world.stored()["rows"] if row["state"] == "higher"]
    rounds = world.do(world.rounds())
    assert len(set(world.made)) == len(world.made) == len(rounds.jobs), "no run is done twice"
    assert before.items() <= world.states().items()
    assert all(row in world.stored()["rows"] for row in kept), "with their intervals"
    whole = World(tmp_path / "whole", [1, 1.3, 0.8, 1.02, 1.05], noise=0.01)
    whole.do(whole.rounds())
    assert whole.made == world.made
    assert whole.stored() == world.stored()


def test_unchanged_records_are_tested_once(tmp_path, monkeypatch) -> None:
    """A smaller sweep.max_repeats has a larger level, for further looks."""
    world = World(tmp_path, [1, 1.3, 0.8, 1.03, 1.05], noise=0.02)
    world.do(world.rounds())
    before = world.stored()
    monkeypatch.setattr(rounds_module, "decide", None)
    world.do(world.rounds())
    assert world.stored() == before


def test_baseline_stops_with_its_rows(tmp_path) -> None:
    """Of two groups, the first is decided after three rounds."""
    rounds = World(tmp_path, [1, 1.3, 0.8, 1.03]).rounds()
    base, row, other, last = (("optimizer=adamw",), ("optimizer=adafactor",),
                              ("optimizer=sgd",), ("optimizer=lion",))  # fmt: skip
    rounds._rows = {
        row: RowDecision(State.higher, 3, baseline=base, stopped=3),
        last: RowDecision(State.open, 3, baseline=other),
    }
    due = [key for key in (base, row, other, last) if rounds._is_due(key, 3)]
    assert due == [other, last]
    assert rounds._is_due(base, 2)


def test_failed_row_stops_and_is_retried(tmp_path) -> None:
    world = World(tmp_path, [1, 1.2, 1.3, 1.0])
    world.fails["sgd"] = Outcome.crashed
    world.do(world.rounds())
    assert world.states()["sgd"] == "failed"
    assert world.repeats()["sgd"] == 0
    world.fails.clear()
    world.do(world.rounds())
    assert world.states()["sgd"] == "higher"
    assert world.repeats()["sgd"] >= 3
    assert len(set(world.made)) == len(world.made)


def test_late_baseline_failure_ends_the_rounds(tmp_path) -> None:
    world = World(tmp_path, [1, 1.2, 1.02, 1.0], noise=0.02)
    rounds = world.rounds()
    for batch in rounds:
        for job in batch:
            key = job.label, job.plan.config.repeat
            world.fails = {"adamw": Outcome.oom} if key[1] == 3 else {}
            world._run(job, key)
    assert max(repeat for _, repeat in world.made) == 3
    assert rounds.is_over


def test_failed_first_row_is_not_the_baseline(tmp_path) -> None:
    world = World(tmp_path, [1, 1.0, 1.3, 0.7])
    world.fails["adamw"] = Outcome.oom
    world.do(world.rounds())
    assert world.states() == {"adamw": "failed", "sgd": "higher", "lion": "lower"}


def test_higher_repeat_limit_reopens_futile_rows(tmp_path, capsys) -> None:
    world = World(tmp_path, [1, 1.06, 0.93, 1.06, 1.06, 1.3], noise=0.04, max_repeats=5)
    world.do(world.rounds())
    assert "futile" in world.states().values()
    level, decided = (
        world.stored()["level"],
        {name for name, state in world.states().items() if state in ("higher", "lower", "same")},
    )
    world.do(world.rounds(max_repeats=20))
    said = capsys.readouterr().out
    assert "2.7 %" in said
    assert "0.9 %" in said
    assert world.stored()["level"] < level
    states = world.states()
    assert all(states[name] in ("higher", "lower", "same") for name in decided)
    assert max(repeat for _, repeat in world.made) > 5
    assert len(set(world.made)) == len(world.made)


def test_rerun_rows_are_decided_from_new_records(tmp_path) -> None:
    world = World(tmp_path, [1, 1.3, 0.8, 1.0])
    world.do(world.rounds())
    world.factors["adafactor"] = 0.7
    for key in [key for key in world.records if key[0] == "adafactor"]:
        del world.records[key]  # another version of a library
    world.do(world.rounds())
    assert world.states()["adafactor"] == "lower"
    assert world.states()["sgd"] == "lower"
    assert world.repeats()["sgd"] == 3


@pytest.mark.parametrize("text", ["", "[]", '{"repeats": []}', '{"repeats": {"max_repeats": "x"}}'])
def test_damaged_file_has_no_decisions(text, tmp_path) -> None:
    world = World(tmp_path, [1, 1.3, 0.8, 1.0])
    world.do(world.rounds())
    before, made = world.stored(), list(world.made)
    world.paths.sweep.write_text(text)
    world.do(world.rounds())
    assert world.made == made
    assert world.stored() == before


def test_budget_ends_the_sweep_between_rounds(tmp_path, capsys) -> None:
    """A run takes 3 s to start and 8 s to train."""
    world = World(tmp_path, [1, 1.03, 0.98, 1.02], noise=0.03, budget=4 * 11.2 * 4 / 3600)
    rounds = world.do(world.rounds())
    assert max(repeat for _, repeat in world.made) == 3
    assert rounds.is_over
    assert "sweep.budget" in "".join(rounds.outcome_lines())
    world.do(world.rounds(budget=None))
    assert max(repeat for _, repeat in world.made) > 3


def test_interrupted_sweep_is_resumable(tmp_path) -> None:
    world = World(tmp_path, [1, 1.03, 0.98])
    rounds = world.do(world.rounds(), kill_at=("sgd", 1))
    assert not rounds.is_over


def test_summary_names_open_rows_and_their_cost(tmp_path, monkeypatch) -> None:
    world = World(tmp_path, [1, 1.3, 1.03, 0.97, 1.0], noise=0.03, max_repeats=4, seed=3)
    rounds = world.do(world.rounds())
    monkeypatch.setenv("COLUMNS", "1000")
    first, open_, *_ = rounds.outcome_lines()
    decided = sum(state in ("higher", "lower", "same") for state in world.states().values())
    assert first.strip().startswith(f"{decided} of 4 decided after ")
    assert f"({len(world.made)} runs, " in first
    assert ": 20 runs" in first
    names = [name for name, state in world.states().items() if state in ("open", "futile")]
    assert names
    assert all(name in open_ for name in names)
    status = open_rows(world.paths.folder)
    assert all(name in status for name in names)
    assert f"{decided} of 4" in status


class Cluster(Launcher, StartedSweep):
    """Jobs that run while a command waits, or between two commands; Ctrl-C ends none of them."""

    name, can_detach = "fake", True

    def __init__(self, world: World, ctrl_c_at: int = 99) -> None:
        self._world, self._ctrl_c_at = world, ctrl_c_at
        self.submitted: list[int] = []
        """Number of jobs of each submission."""

    def start(self, books, paths, sweep) -> StartedSweep:
        self._jobs, self._file = books.jobs, books.ledger
        new = [job for job in self._jobs if self._key(job) not in self._world.records]
        self.submitted += [len(new)] if new else []
        for job in self._jobs:
            if job not in new:
                self._end(job)
        return self

    def _end(self, job: Job) -> None:
        self._world._run(job, self._key(job))
        self._file.note(job)

    def _key(self, job: Job) -> tuple[str, int]:
        return job.label, job.plan.config.repeat

    def wait(self) -> bool:
        if len(self.submitted) == self._ctrl_c_at:
            raise KeyboardInterrupt
        self.run()
        return False

    def run(self) -> None:
        """All jobs end."""
        for job in self._jobs:
            if job.outcome is None:
                self._end(job)

    def goes_on(self) -> bool:
        return any(job.outcome is None for job in self._jobs)


def submit(world: World, cluster: Cluster, detach: bool) -> int:
    rounds = world.rounds()
    return run_planned_sweep(rounds._file, list(rounds._keys), "a", cluster, detach, rounds)


def test_detached_command_submits_one_round(tmp_path) -> None:
    world = World(tmp_path, [1, 1.3, 0.8, 1.02], noise=0.01)
    cluster = Cluster(world)
    codes = []
    for number in range(12):
        codes.append(submit(world, cluster, detach=True))
        if len(cluster.submitted) == number:  # the last command submits no round
            break
        cluster.run()
    assert set(codes) == {EXIT_OK}
    assert cluster.submitted[:3] == [4, 4, 4]
    assert len(cluster.submitted) == max(repeat for _, repeat in world.made) + 1
    assert len(set(world.made)) == len(world.made)
    attended = World(tmp_path / "b", [1, 1.3, 0.8, 1.02], noise=0.01)
    assert submit(attended, Cluster(attended), detach=False) == EXIT_OK
    assert (attended.made, attended.stored()) == (world.made, world.stored())


def test_slurm_round_continues_after_ctrl_c(tmp_path) -> None:
    world = World(tmp_path, [1, 1.3, 0.8, 1.0])
    cluster = Cluster(world, ctrl_c_at=2)
    assert submit(world, cluster, detach=False) == EXIT_RESUMABLE
    assert cluster.submitted == [4, 4]
    cluster.run()
    assert submit(world, Cluster(world), detach=False) == EXIT_OK
    assert len(set(world.made)) == len(world.made)


def test_sweep_without_runs_ends_immediately(tmp_path) -> None:
    """A rule rejects all of them."""
    world = World(tmp_path, [1, 1.3])
    cells = [
        SweepRun(("optimizer=lion",), outcome="refused"),
        SweepRun(("x=1",), outcome="refused"),
    ]
    file = SweepFile(world.paths, ["-m"], cells)
    rounds = Rounds(file, cells, [], world.settings)
    assert run_planned_sweep(file, [], "a", Cluster(world), False, rounds) == EXIT_USER


def test_status_of_other_folders_has_no_open_rows(tmp_path) -> None:
    assert open_rows(tmp_path) == ""


TINY = ("data=synthetic", "hardware=cpu", "tracker=none")


@pytest.mark.parametrize(
    ("runs", "settings", "key", "fix"),
    [
        (["seed=1", "seed=2"], {}, "sweep.repeats", "sweep.repeats=3"),
        (["optimizer.lr=0.1", "optimizer.lr=0.2"], {}, "sweep.seeds", "sweep.seeds=per_repeat"),
        (["optimizer=sgd", "optimizer=lion"], {"cpu": 2}, "launcher.cpu_slots",
         "launcher.cpu_slots=1"),
    ],
    ids=["one configuration", "one seed has one loss", "no speed"],
)  # fmt: skip
def test_auto_repeats_without_replicates_are_rejected(runs, settings, key, fix) -> None:
    slots = [f"launcher.cpu_slots={settings['cpu']}"] if settings else []
    composed = [compose([text, *slots, *TINY], in_sweep=True) for text in runs]
    (problem,) = find_repeat_problems(composed, Sweep(repeats="auto"))
    assert (problem.key, problem.fix.words) == (key, (fix,))
    assert not find_repeat_problems(composed, Sweep(repeats="3"))


@pytest.mark.parametrize(
    ("runs", "is_loss"),
    [
        (["optimizer.lr=0.1", "optimizer.lr=0.2"], True),
        (["schedule=cosine", "schedule=constant"], True),
        (["optimizer=sgd", "optimizer=lion"], False),
        (["memory=none", "memory=checkpointing"], False),
    ],
)
def test_loss_decides_if_only_hyperparameters_differ(runs, is_loss) -> None:
    composed = [compose([text, *TINY], in_sweep=True) for text in runs]
    assert rounds_module.is_about_loss(composed) is is_loss
