"""States of GPUs' generators, where a checkpoint moves between machines that have other ones."""

import pytest
import torch

from eke.training.loop.meter import capture_random_state, restore_random_state


def test_fewer_gpus_restore_their_own_states(monkeypatch) -> None:
    """Three were visible when it was saved."""
    state = {**capture_random_state(), "cuda": [torch.full((16,), n) for n in range(3)]}
    given = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        "torch.cuda.random.set_rng_state", lambda s, n: given.append((n, int(s[0])))
    )
    restore_random_state(state)
    assert given == [(0, 0), (1, 1)]


@pytest.mark.parametrize("in_use", [True, False], ids=["on a GPU", "on the CPU beside it"])
def test_cuda_random_state_is_captured_only_if_in_use(in_use, monkeypatch) -> None:
    """Asking for them starts CUDA, where it has not been."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: ["state"])
    assert capture_random_state()["cuda"] == (["state"] if in_use else [])
