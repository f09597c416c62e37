"""Which finished run answers, where nodes differ from the machine that plans."""

import dataclasses

import pytest
from unit.launch.scripted import record_for

from eke.common.files import write_json
from eke.common.paths import RunPaths
from eke.launch.slurm import SlurmLauncher
from eke.plan.record import write_record

LOGIN = {"device": "NVIDIA H100 80GB HBM3", "torch": "2.13.0"}
NODE = {"device": "NVIDIA H100 80GB HBM3", "torch": "2.12.0+image"}


@pytest.fixture
def planned(plan, tmp_path):
    """A plan of the login node's, whose run has finished on a node with other software."""
    config = dataclasses.replace(plan.config, paths=dataclasses.replace(plan.config.paths))
    config.paths.runs = str(tmp_path / "runs")
    mine = dataclasses.replace(plan, config=config, machine=dict(LOGIN))
    paths = RunPaths(tmp_path / "runs" / plan.run_id)
    paths.folder.mkdir(parents=True)
    record = record_for(plan.run_id, "ok", 3)
    record.machine = dict(NODE)
    write_record(paths, record)
    return mine, paths


def test_record_planned_with_the_same_software_is_reused(planned) -> None:
    plan, paths = planned
    write_json(paths.planned_with, LOGIN)
    assert SlurmLauncher().place_of(plan).record is not None


def test_new_software_on_the_planning_host_runs_separately(planned) -> None:
    plan, paths = planned
    write_json(paths.planned_with, {**LOGIN, "torch": "2.11.0"})
    place = SlurmLauncher().place_of(plan)
    assert place.record is None
    assert "torch: 2.11.0 -> 2.13.0" in place.note


@pytest.mark.parametrize("content", [None, "[]", "{"], ids=["absent", "a list", "torn"])
def test_record_without_cluster_planning_is_not_reused(content, planned) -> None:
    plan, paths = planned
    if content is not None:
        paths.planned_with.write_text(content)
    assert SlurmLauncher().place_of(plan).record is None
    same = dataclasses.replace(plan, machine=dict(NODE))
    assert SlurmLauncher().place_of(same).record is not None
