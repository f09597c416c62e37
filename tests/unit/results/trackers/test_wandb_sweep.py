"""A run that an agent of a W&B sweep has started."""

import pytest
from wandb_reader import read_wandb_file

from .conftest import find_wandb_files, start_child


@pytest.mark.slow
def test_the_run_stays_in_its_sweep(tmp_path) -> None:
    """W&B's agent has given the run an id; eke's own would be a run outside the sweep."""
    folder = tmp_path / "run"
    folder.mkdir()
    agent = {"WANDB_SWEEP_ID": "sw33p1d0", "WANDB_RUN_ID": "ag3ntrun", "HOME": str(tmp_path)}
    child = start_child(folder, **agent)
    stdout, stderr = child.communicate("5\n", timeout=60)
    assert "problem: None" in stdout or "problem: \n" in stdout, stdout + stderr
    (file,) = find_wandb_files(folder)
    assert read_wandb_file(file).run_id == "ag3ntrun"
