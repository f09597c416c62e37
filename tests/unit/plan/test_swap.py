"""Files of a state on a disk: a folder per run, removed rank by rank."""

import pytest
from unit.plan.cases import SYNTHETIC, config_of, plan_config

from eke.common.paths import RunPaths
from eke.plan.planner import remove_swap, swap_files, swap_folder

NVME = (*SYNTHETIC, "model=tiny", "distributed=zero3", "offload=nvme", "offload.path=/disk")


def test_each_run_has_its_own_swap_folder(tmp_path) -> None:
    plan = plan_config(config_of(*NVME))
    one, two = (swap_folder(plan, RunPaths(tmp_path / at / "abc")) for at in ("runs", "other"))
    assert one != two
    assert one.parent.as_posix() == "/disk"
    assert one.name.startswith("eke-abc-")


@pytest.mark.slow
def test_state_in_memory_has_no_swap_folder(tmp_path) -> None:
    plan = plan_config(config_of(*SYNTHETIC, "model=tiny", "distributed=zero3"))
    assert swap_folder(plan, RunPaths(tmp_path)) is None
    remove_swap(None, 0)


@pytest.fixture
def files(tmp_path):
    for rank in (0, 1):
        for kind, size in (("optimizer", 7), ("float32params", 3)):
            folder = tmp_path / "run" / "zero_stage_3" / kind / f"rank{rank}"
            folder.mkdir(parents=True)
            (folder / "a.tensor.swp").write_bytes(b"." * size)
    return tmp_path / "run"


def test_bytes_are_counted_by_rank(files) -> None:
    assert swap_files(files, 1) == {"optimizer": 7, "weights": 3}


def test_last_rank_removes_the_swap_folder(files) -> None:
    remove_swap(files, 0)
    assert swap_files(files, 0) == {"optimizer": 0, "weights": 0}
    assert swap_files(files, 1) == {"optimizer": 7, "weights": 3}
    remove_swap(files, 1)
    assert not files.exists()


def test_swap_removal_keeps_foreign_files(files) -> None:
    (files / "mine.txt").touch()
    remove_swap(files)
    assert [file.name for file in files.iterdir()] == ["mine.txt"]
