"""The process that trains, before it does."""

import sys

import pytest
from unit.plan.cases import plan_of

from eke.common.paths import RunPaths
from eke.plan.planner import write_plan
from eke.plan.record import read_record
from eke.training.loop.stop import StopFlag
from eke.training.loop.worker import run_rank_0


class OtherPyTorch:
    """A finder with which what trains cannot be imported."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, name: str, *_: object) -> None:
        """Nothing, or that a name is missing."""
        if name == "eke.training.loop.attempt":
            raise ImportError(f"cannot import name 'X' from '{self.name}' (a/path)", name=self.name)


def test_incomplete_torch_is_recorded(tmp_path, monkeypatch) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.folder.mkdir()
    write_plan(paths, plan_of("data=synthetic"))
    monkeypatch.delitem(sys.modules, "eke.training.loop.attempt", raising=False)
    monkeypatch.setattr(sys, "meta_path", [OtherPyTorch("torch._C._new"), *sys.meta_path])
    assert run_rank_0(paths, StopFlag(), None) == 1
    record = read_record(paths)
    assert (record.outcome, record.attempt, record.failure.phase) == ("crashed", 0, "import")
    assert "'torch._C._new'" in record.failure.message
    assert "pip install torch==" in record.failure.message
    monkeypatch.setattr(sys, "meta_path", [OtherPyTorch("eke.training"), *sys.meta_path[1:]])
    with pytest.raises(ImportError):
        run_rank_0(paths, StopFlag(), None)
