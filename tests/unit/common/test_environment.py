"""What a process that eke starts inherits from the shell."""

import os
from types import SimpleNamespace

import pytest

from eke import workflows
from eke.common.process_env import (
    child_environment,
    ensure_home,
    leave_tracked_run,
    ranks_are_started,
)

LEFT_OVER = [
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
    *("GROUP_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "ACCELERATE_USE_FSDP", "OMPI_COMM_WORLD_RANK"),
    *("PMI_RANK", "PMIX_RANK", "CROSS_SIZE", "LOCAL_SIZE", "WANDB_RUN_ID"),
    *("WANDB_RESUME", "MLFLOW_RUN_ID", "SUBMITIT_EXECUTOR"),
]
KEPT = [
    *("NCCL_DEBUG", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "HF_HOME", "CUDA_VISIBLE_DEVICES"),
    *("WANDB_API_KEY", "WANDB_PROJECT", "WANDB_MODE", "PATH", "MY_RANK", "SLURM_JOB_ID"),
]
STARTED = {"RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


@pytest.mark.parametrize("left_over", [["RANK"], ["OMPI_COMM_WORLD_RANK"], LEFT_OVER], ids=len)
def test_variables_of_another_job_are_not_inherited(left_over, monkeypatch) -> None:
    for name in (*left_over, *KEPT):
        monkeypatch.setenv(name, "1")
    environment = child_environment()
    assert not set(environment) & set(LEFT_OVER)
    assert set(environment) >= set(KEPT)


def test_run_of_a_wandb_agent_stays_in_its_sweep(monkeypatch) -> None:
    for name in ("WANDB_RUN_ID", "WANDB_SWEEP_ID"):
        monkeypatch.setenv(name, "1")
    assert {"WANDB_RUN_ID", "WANDB_SWEEP_ID"} <= set(child_environment())
    monkeypatch.delenv("WANDB_RUN_ID")
    assert "WANDB_SWEEP_ID" not in child_environment()


def test_process_started_by_torchrun_keeps_its_rank(monkeypatch) -> None:
    for name, value in {**STARTED, "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "7"}.items():
        monkeypatch.setenv(name, value)
    assert ranks_are_started()
    assert child_environment()["RANK"] == "1"


@pytest.mark.parametrize("missing", [*STARTED])
def test_incomplete_rank_variables_start_no_ranks(missing, monkeypatch) -> None:
    for name, value in {**STARTED, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    assert not ranks_are_started()
    assert "WORLD_SIZE" not in child_environment()


ONE_RUN = [
    *("WANDB_RUN_ID", "WANDB_SWEEP_ID", "WANDB_NAME", "WANDB_RESUME", "WANDB_RESUME_FROM"),
    *("WANDB_FORK_FROM", "WANDB_SWEEP_PARAM_PATH", "MLFLOW_RUN_ID", "MLFLOW_NESTED_RUN"),
]


@pytest.fixture
def by_an_agent(monkeypatch) -> None:
    for name in (*ONE_RUN, *KEPT):
        monkeypatch.setenv(name, "1")


def test_variables_of_a_single_run_are_removed_for_several_runs(by_an_agent, capsys) -> None:
    leave_tracked_run()
    assert not set(ONE_RUN) & set(os.environ)
    assert set(KEPT) <= set(os.environ)
    assert "agent" in capsys.readouterr().err
    leave_tracked_run()
    assert not capsys.readouterr().err, "without an agent there is nothing to say"


class Reached(Exception):
    """The runs would start now."""


def stop(*_: object) -> None:
    raise Reached


@pytest.mark.parametrize("count", [1, 2])
def test_sweep_is_detached_from_the_agent_run(count, by_an_agent, monkeypatch) -> None:
    """With one run, the id that the agent gave is that run's, also in a cluster."""
    from eke.workflows import sweep

    monkeypatch.setattr(sweep, "open_board", stop)
    with pytest.raises(Reached):
        sweep.run_planned_sweep(SimpleNamespace(cells=[]), [None] * count, "", None, False)
    assert ("WANDB_RUN_ID" in os.environ) is (count == 1)


def test_hydra_jobs_are_detached_from_the_agent_run(by_an_agent, monkeypatch) -> None:
    monkeypatch.setattr(workflows, "sweep_by_hydra", stop)
    monkeypatch.setattr(workflows, "check_started_ranks", lambda *_: None)
    with pytest.raises(Reached):
        workflows.main(["-m", "seed=1,2", "hydra/launcher=joblib"])
    assert not set(ONE_RUN) & set(os.environ)


@pytest.fixture
def no_home(monkeypatch, tmp_path) -> None:
    """A user id of a container: no HOME and no entry in passwd."""

    def unknown(_: int) -> None:
        raise KeyError

    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_user_without_home_gets_a_private_folder(no_home, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HOME", "")  # so that it is taken back
    monkeypatch.delenv("HOME")
    ensure_home()
    (home,) = tmp_path.iterdir()
    assert os.environ["HOME"] == str(home)
    assert home.stat().st_mode & 0o777 == 0o700


def test_world_writable_home_is_not_used(no_home, tmp_path) -> None:
    planted = tmp_path / f"eke-{os.geteuid()}"
    planted.mkdir()
    planted.chmod(0o777)
    ensure_home()
    assert "HOME" not in os.environ


def test_planning_works_without_a_home(no_home, make_plan, monkeypatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert make_plan("data=synthetic", "tracker=wandb", "model=tiny")
    online = ("tracker.mode=online", "data=synthetic", "model=tiny")
    with pytest.raises(workflows.ConfigError) as refused:
        make_plan(*online)
    assert refused.value.rule == "online_needs_key"
