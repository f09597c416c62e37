"""`rerun=true` of a sweep: an interrupted one goes on, one that is done begins again."""

import dataclasses

import pytest
from unit.launch.scripted import record_for

from eke.common.paths import RunPaths, SweepPaths
from eke.launch.processes.run_dir import find_place
from eke.launch.processes.sweep import CHANGED, Job
from eke.launch.processes.sweep_scheduler import Rerun
from eke.launch.slurm import SlurmLauncher
from eke.plan.record import Outcome, start_attempt, write_record


@pytest.fixture
def runs(tmp_path):
    return tmp_path / "runs"


@pytest.fixture
def sweep(runs):
    return SweepPaths(runs / "sweep-1")


@pytest.fixture
def jobs(plan, runs):
    """Three runs, each new whenever the sweep is typed."""

    def jobs(*run_ids: str) -> list[Job]:
        made = []
        for number, run_id in enumerate(run_ids or "abc"):
            config = dataclasses.replace(plan.config, rerun=True)
            config.paths = dataclasses.replace(config.paths, runs=str(runs))
            mine = dataclasses.replace(plan, run_id=run_id, config=config)
            made.append(Job(number, run_id, mine))
        return made

    return jobs


def work(job: Job, rerun: Rerun, outcome: str = "ok", where=find_place) -> str:
    """Do a run, or have it answered; returns its folder's name, `=` before it if answered."""
    place = where(job.plan, rerun.old)
    job.folder = str(place.paths.folder)
    if place.record is None:
        place.paths.folder.mkdir(parents=True, exist_ok=True)
        start_attempt(place.paths, job.plan.machine)
        record = record_for(job.plan.run_id, outcome, 3)
        record.machine = dict(job.plan.machine)
        write_record(place.paths, record)
    job.end(Outcome[outcome] if place.record is None else Outcome[place.record.outcome])
    return ("=" if place.record else "") + place.paths.folder.name


def typed(sweep, jobs, stop_after: int = 3, outcomes=("ok",) * 3, where=find_place) -> list[str]:
    """One command, which may be interrupted after some runs."""
    rerun = Rerun(sweep, jobs)
    done = [work(j, rerun, o, where) for j, o in zip(jobs[:stop_after], outcomes, strict=False)]
    rerun.end()
    return done


@pytest.mark.parametrize("where", [find_place, SlurmLauncher().place_of], ids=["here", "slurm"])
def test_rerun_resumes_interrupted_and_restarts_finished_sweeps(sweep, jobs, where) -> None:
    assert typed(sweep, jobs(), where=where) == ["a", "b", "c"]
    assert typed(sweep, jobs(), stop_after=1, where=where) == ["a-2"]
    assert typed(sweep, jobs(), stop_after=2, where=where) == ["=a-2", "b-2"]
    assert typed(sweep, jobs(), where=where) == ["=a-2", "=b-2", "c-2"]
    assert typed(sweep, jobs(), where=where) == ["a-3", "b-3", "c-3"]


def test_kill_at_any_moment_loses_no_finished_run(sweep, jobs) -> None:
    """Nothing is written between the beginning and the end."""
    rerun = Rerun(sweep, made := jobs())
    assert [work(job, rerun) for job in made] == ["a", "b", "c"]
    assert typed(sweep, jobs()) == ["=a", "=b", "=c"], "killed before it could note its end"
    assert typed(sweep, jobs()) == ["a-2", "b-2", "c-2"]


def test_unfinished_run_is_resumed(sweep, jobs) -> None:
    typed(sweep, jobs())
    assert typed(sweep, jobs(), 2, ("ok", "preempted")) == ["a-2", "b-2"]
    assert typed(sweep, jobs()) == ["=a-2", "b-2", "c-2"]


@pytest.mark.parametrize("outcome", ["crashed", "refused"])
def test_rerun_repeats_only_crashed_or_rejected_runs(sweep, jobs, outcome) -> None:
    made = jobs()
    rerun = Rerun(sweep, made)
    for job, each in zip(made, ("ok", outcome, "oom"), strict=True):
        work(job, rerun, each)
    made[1].rule = CHANGED if outcome == "refused" else ""
    rerun.end()
    assert typed(sweep, jobs()) == ["=a", "b", "=c"]
    assert typed(sweep, jobs()) == ["a-2", "b-2", "c-2"]


def test_concurrent_reruns_share_one_state(sweep, jobs) -> None:
    typed(sweep, jobs())
    first, second = Rerun(sweep, one := jobs()), Rerun(sweep, two := jobs())
    assert first.old == second.old == {"a", "b", "c"}
    assert work(one[0], first) == "a-2"
    assert work(two[1], second) == "b-2"
    assert [work(job, first) for job in one[1:]] == ["=b-2", "c-2"]
    first.end()
    third = Rerun(sweep, three := jobs())
    assert work(three[0], third) == "a-3", "the first has met its demand"
    assert [work(job, second) for job in (two[0], two[2])] == ["=a-2", "=c-2"]
    second.end()
    assert typed(sweep, jobs(), 1) == ["=a-3"], "an end of the one is none of the other"


def test_rerun_repeats_only_runs_without_a_record(sweep, jobs, runs) -> None:
    """`eke retry` sets records aside and types the sweep again."""
    typed(sweep, jobs(), outcomes=("ok", "oom", "ok"))
    RunPaths(runs / "b").record.rename(runs / "b" / "record.1.json")
    assert typed(sweep, jobs()) == ["=a", "b", "=c"]
    assert typed(sweep, jobs()) == ["a-2", "b-2", "c-2"]


def test_rerun_with_other_data_reuses_no_record(sweep, jobs, plan) -> None:
    typed(sweep, jobs("x", "b", "c"))
    assert typed(SweepPaths(sweep.folder.with_name("sweep-2")), jobs(), 1) == ["a"]
    assert typed(sweep, jobs("x", "b", "c"), 1) == ["x-2"]
    assert typed(sweep, jobs("a", "b", "c")) == ["a-2", "b-2", "c-2"], "a was there before"


def test_sweep_without_rerun_writes_no_state(sweep, make_jobs) -> None:
    rerun = Rerun(sweep, make_jobs(1, 1))
    rerun.end()
    assert not sweep.folder.exists()
    assert (rerun.old, rerun.goes_on) == (set(), False)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"met": ["a"]}'])
def test_damaged_rerun_file_restarts_or_continues(sweep, jobs, content) -> None:
    typed(sweep, jobs())
    sweep.rerun.write_text(content)
    assert typed(sweep, jobs()) == ["a-2", "b-2", "c-2"]
