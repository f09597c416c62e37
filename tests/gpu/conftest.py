"""These need a CUDA device; `make test-gpu` runs them, everything else leaves them out."""

import pytest

from eke.hardware import detect


@pytest.fixture(autouse=True)
def needs_cuda() -> None:
    """Skip where there is no CUDA device, so that a stray selection says why."""
    if detect().kind != "cuda":
        pytest.skip("no CUDA device")
