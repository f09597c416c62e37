"""Run folders of whatever outcome."""

import os

import pytest
from unit.launch.scripted import record_for

from eke.common.paths import RunPaths
from eke.plan.record import write_record


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


@pytest.fixture
def make_run(runs):
    """A run folder, with a record if it has an outcome."""

    def make(name: str, outcome: str = "", log: str = "") -> RunPaths:
        paths = RunPaths(runs / name)
        paths.folder.mkdir(parents=True)
        paths.plan.write_text('{"steps": {"total": 20}}')
        paths.config.write_text(f"# optimizer=sgd seed={name}\n")
        if outcome:
            write_record(paths, record_for(name, outcome, 7))
        if log:
            paths.log.write_text(log)
        return paths

    return make
