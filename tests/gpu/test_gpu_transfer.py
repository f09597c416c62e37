"""Copies to a GPU: beside what is computed, and there in time."""

import pytest
import torch
from on_device import ON

from eke.training.batches.batches import MicroBatch, Transfer

pytestmark = pytest.mark.gpu

CYCLES = 1_000_000_000
"""Of a kernel that does nothing: half a second at 2 GHz."""


def test_copy_to_gpu_does_not_wait_for_pending_kernels() -> None:
    if ON != "cuda":
        pytest.skip("a CPU computes on the host: nothing is copied")
    device = torch.device("cuda")
    transfer = Transfer(device)
    ids = torch.arange(4096).reshape(8, 512)
    batch = MicroBatch({"input_ids": ids}, ids + 1, 8, 4096, 8192).pin_memory()
    transfer(batch)  # the first allocation in its stream may wait for the device
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    moved = transfer(batch)
    transfer.stream.synchronize()
    assert not torch.cuda.current_stream().query(), "the kernel before it is over: nothing is shown"
    total = moved.inputs["input_ids"].sum() + moved.labels.sum()  # waits its turn
    assert total.item() == int(ids.sum() * 2 + ids.numel())
