"""What the record says of the exchange between processes: whether there is one, and how."""

import dataclasses
import os
from types import SimpleNamespace

import pytest
import torch
from unit.training.model.plans import hand_plan

from eke.training.distributed.ranks import P2P_VARIABLE, join_ranks
from eke.training.observe.record_settings import note_copies, note_transport


def job_of(p2p: str, per_rank: list[str], device: str = "cuda") -> SimpleNamespace:
    """A job whose ranks have these values in their environments."""
    warnings: list[str] = []
    ranks = SimpleNamespace(world_size=len(per_rank), gather=lambda mine: per_rank)
    plan = hand_plan("distributed=ddp", f"distributed.p2p={p2p}")
    return SimpleNamespace(
        plan=plan, ranks=ranks, device=torch.device(device), effective={}, warnings=warnings,
        warn=warnings.append,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def unset(monkeypatch) -> None:
    monkeypatch.setenv(P2P_VARIABLE, "0")  # so that what a test sets is taken back
    monkeypatch.delenv(P2P_VARIABLE)


def test_p2p_off_sets_the_nccl_variable() -> None:
    for p2p, value in (("auto", None), ("off", "1")):
        join_ranks(hand_plan("distributed=ddp", f"distributed.p2p={p2p}"))
        assert os.environ.get(P2P_VARIABLE) == value


def test_record_holds_the_transport_of_every_rank() -> None:
    job = job_of("off", ["1", "1"])
    note_transport(job)
    assert job.effective["nccl_p2p"] == ["off", "off"]
    assert not job.warnings


@pytest.mark.parametrize(
    ("p2p", "per_rank", "words"),
    [("off", ["1", ""], "1, unset"), ("auto", ["1", "1"], "1, 1"), ("off", ["0", "0"], "0, 0")],
)
def test_different_transport_is_warned_about(p2p, per_rank, words) -> None:
    job = job_of(p2p, per_rank)
    note_transport(job)
    (warning,) = job.warnings
    assert warning.startswith(f"distributed.p2p={p2p}, ")
    assert f"NCCL_P2P_DISABLE is {words} " in warning


def test_cpu_has_no_nccl() -> None:
    job = job_of("auto", ["", ""], device="cpu")
    note_transport(job)
    assert job.effective == {}


def test_missing_gradient_exchange_is_reported() -> None:
    """tests/equivalence/test_ranks.py sees those that do."""
    job = job_of("auto", ["", ""], "cpu")
    job.plan = dataclasses.replace(
        job.plan, batch=dataclasses.replace(job.plan.batch, world_size=2)
    )
    job.model = torch.nn.Linear(2, 2)
    note_copies(job)
    assert job.effective == {"copies": 1}
    assert job.warnings == [
        "distributed=ddp had no effect: gradients of 1 of 2 processes are exchanged"
    ]
