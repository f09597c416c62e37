"""What a process that eke starts inherits from the shell."""

import pytest

from eke.common.process_env import child_environment, ranks_are_started

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


def test_a_run_that_an_agent_started_stays_in_its_sweep(monkeypatch) -> None:
    for name in ("WANDB_RUN_ID", "WANDB_SWEEP_ID"):
        monkeypatch.setenv(name, "1")
    assert {"WANDB_RUN_ID", "WANDB_SWEEP_ID"} <= set(child_environment())
    monkeypatch.delenv("WANDB_RUN_ID")
    assert "WANDB_SWEEP_ID" not in child_environment()


def test_a_process_that_torchrun_started_keeps_its_rank(monkeypatch) -> None:
    for name, value in {**STARTED, "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "7"}.items():
        monkeypatch.setenv(name, value)
    assert ranks_are_started()
    assert child_environment()["RANK"] == "1"


@pytest.mark.parametrize("missing", [*STARTED])
def test_a_part_of_the_variables_starts_no_ranks(missing, monkeypatch) -> None:
    for name, value in {**STARTED, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    assert not ranks_are_started()
    assert "WORLD_SIZE" not in child_environment()
