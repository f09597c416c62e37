"""Trainings that leave their job to be looked at."""

import importlib
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from support import last_wins

import eke.data.sources.request as asking


@pytest.fixture
def job_of(make_plan, tmp_path):
    """Overrides -> the job, trained to its end in a folder of the given name."""
    from trained import train_job

    def run(name: str, *overrides: str):
        return train_job(make_plan(*last_wins(*overrides)), tmp_path / name)

    return run


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """Prepared rows, which are the same for each test."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def prepared_here(cache, monkeypatch) -> None:
    """Rows are prepared in this process; a separate process takes seconds to start."""
    from eke.data.preparation.rows import prepare_store

    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(asking, "_run_preparation", prepare_store)


@pytest.fixture
def alone(monkeypatch) -> Iterator[None]:
    """What DeepSpeed does to this process is undone after the test."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("LOCAL_RANK", "0")  # so that it is taken back afterwards
    monkeypatch.delenv("LOCAL_RANK")
    yield
    if dist.is_initialized():  # its group of one, in which whatever comes later would be
        dist.destroy_process_group()
        comm = importlib.import_module("deepspeed.comm.comm")
        comm.cdb = None
        importlib.reload(importlib.import_module("deepspeed.utils.groups"))  # it keeps groups
