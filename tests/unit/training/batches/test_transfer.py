"""Copies to the device: here the order of what is asked of CUDA, which is not here."""

from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

from eke.training.batches.batches import MicroBatch, Transfer


def batch() -> MicroBatch:
    ids = torch.arange(6).reshape(2, 3)
    return MicroBatch({"input_ids": ids, "attention_mask": ids > 0}, ids, 2, 4, 6)


def test_cpu_transfer_does_not_copy() -> None:
    before = batch()
    moved = Transfer(torch.device("cpu"))(before)
    assert [m is b for m, b in zip(moved.tensors, before.tensors, strict=True)] == [True] * 3
    assert (moved.num_samples, moved.num_targets, moved.num_tokens) == (2, 4, 6)


@dataclass
class FakeStream:
    name: str
    said: list[str]

    def wait_stream(self, other: "FakeStream") -> None:
        self.said.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def said(monkeypatch) -> list[str]:
    """What was asked of CUDA, in order."""
    said: list[str] = []
    now = [FakeStream("computing", said)]

    @contextmanager
    def stream(other: FakeStream):
        now.append(other)
        yield
        now.pop()

    def copy(tensor, device, non_blocking):
        said.append(f"copied in {now[-1].name}{'' if non_blocking else ', waiting'}")
        return tensor.clone()

    def record_stream(tensor, stream):
        said.append(f"kept for {stream.name}")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream("copying", said))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now[-1])
    monkeypatch.setattr(torch.Tensor, "to", copy)
    monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
    return said


def test_gpu_transfer_uses_a_copy_stream(said) -> None:
    Transfer(torch.device("cuda"))(batch())
    assert said == [
        *["copied in copying"] * 3,
        "computing waits for copying",
        *["kept for computing"] * 3,
    ]
