"""Activations that wait in host memory: copied beside the passes, and there in time."""

import contextlib

import pytest
import torch
from on_device import ON
from torch import Tensor, nn

from eke.training.model.activation_offload import ActivationOffload

pytestmark = pytest.mark.gpu

CYCLES = 1_000_000_000
"""Of a kernel that does nothing: half a second at 2 GHz."""

LAYERS, WIDTH = 24, 1024


@pytest.fixture
def model() -> nn.Module:
    if ON != "cuda":
        pytest.skip("a CPU computes on the host: nothing is copied")
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
    return nn.Sequential(*layers).cuda()


def gradients(
    model: nn.Module, x: Tensor, context: contextlib.AbstractContextManager[None]
) -> list[Tensor]:
    model.zero_grad()
    with context:
        loss = model(x).square().mean()
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_offload_gradients_are_bit_exact(model: nn.Module) -> None:
    offload = ActivationOffload(model)
    for rows in (512, 4096, 512, 4096, 4096):
        x = torch.randn(rows, WIDTH, device="cuda")
        kept = gradients(model, x, contextlib.nullcontext())
        moved = gradients(model, x, offload)
        assert all(map(torch.equal, kept, moved))
    assert offload.bytes_moved > 0


def test_activation_offload_lowers_the_peak(model: nn.Module) -> None:
    x = torch.randn(16384, WIDTH, device="cuda")
    peaks = []
    for context in (contextlib.nullcontext(), ActivationOffload(model)):
        gradients(model, x, context)
        torch.cuda.reset_peak_memory_stats()
        gradients(model, x, context)
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] < 0.6 * peaks[0]


def test_offload_copies_overlap_with_computation(model: nn.Module) -> None:
    offload = ActivationOffload(model)
    x = torch.randn(4096, WIDTH, device="cuda")
    gradients(model, x, offload)  # page-locked memory is there from now on
    torch.cuda.synchronize()
    with offload:
        loss = model(x).square().mean()
        torch.cuda._sleep(CYCLES)
    assert offload.stream is not None
    offload.stream.synchronize()
    assert not torch.cuda.current_stream().query(), "the kernel is over: nothing is shown"
    loss.backward()
