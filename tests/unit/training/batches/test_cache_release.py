"""Emptying the allocator: in which steps, and on which devices."""

import pytest
import torch

from eke.training.batches.batches import CacheRelease

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture
def emptied(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(True))
    return calls


@pytest.mark.parametrize(("every", "expected"), [(1, 6), (2, 3), (4, 1), (7, 0), (None, 0)])
def test_cache_is_emptied_every_nth_gpu_step(every, expected, emptied):
    release = CacheRelease(every, CUDA)
    for step in range(6):
        release.after_forward(step)
    assert release.calls == len(emptied) == expected


def test_cpu_has_no_allocator_cache(emptied):
    release = CacheRelease(1, CPU)
    release.after_forward(0)
    assert (release.calls, emptied) == (0, [])
