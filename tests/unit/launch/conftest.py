"""A run folder and a plan that costs nothing."""

import functools

import pytest
from unit.plan.cases import SYNTHETIC, plan_of

from eke.paths import RunPaths
from eke.plan import Plan


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
