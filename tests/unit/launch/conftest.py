"""A run folder and a plan that costs nothing."""

import dataclasses
import functools
import os
from collections.abc import Callable

import pytest
from unit.plan.cases import SYNTHETIC, plan_of

from eke.common.paths import RunPaths
from eke.launch.processes.sweep import Job
from eke.plan.planner import Plan


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch) -> None:
    """These tests lose no power, and a disk takes its time."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@functools.cache
def shared_plan() -> Plan:
    """One plan for all tests of this folder; frozen."""
    return plan_of(*SYNTHETIC)


@pytest.fixture
def plan() -> Plan:
    """Twenty steps."""
    return shared_plan()


@pytest.fixture
def paths(tmp_path):
    """An empty run folder."""
    folder = tmp_path / "runs" / "run"
    folder.mkdir(parents=True)
    return RunPaths(folder)


@pytest.fixture
def make_jobs(plan) -> Callable[..., list[Job]]:
    """Jobs on GPUs that need so many devices each; `a`, `b`, ... are their run ids."""

    def make(*needs: int, **overrides) -> list[Job]:
        device = dataclasses.replace(plan.device, kind="cuda", count=8)
        jobs, letters = [], "abcdefghijklmnopqrstuvwxyz"
        for number, need in enumerate(needs):
            batch = dataclasses.replace(plan.batch, world_size=need)
            name = letters[number] if number < len(letters) else f"run{number}"
            own = dataclasses.replace(plan, run_id=name, batch=batch, device=device, **overrides)
            jobs.append(Job(number, name, own))
        return jobs

    return make
