"""Trainings that leave their job to be looked at."""

import pytest
from support import last_wins

from eke.paths import RunPaths


@pytest.fixture
def job_of(make_plan, tmp_path):
    """Overrides -> the job, trained to its end in a folder of the given name."""
    from eke.run.job import build_job
    from eke.run.loop import train
    from eke.run.meter import HostClock, Meter
    from eke.run.stop import StopFlag
    from eke.track.tracker import Untracked

    def run(name: str, *overrides: str):
        plan = make_plan(*last_wins(*overrides))
        paths = RunPaths(tmp_path / name)
        paths.folder.mkdir(exist_ok=True)
        job = build_job(plan, paths, 0, StopFlag(), Untracked(), Meter(HostClock(), 0, 0), {})
        train(job)
        return job

    return run
