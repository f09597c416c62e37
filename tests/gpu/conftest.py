"""What only a GPU shows; `make test-gpu` runs these, everything else leaves them out.

They train in the test's own process: a second each, where a fresh one takes ten to start. A
kernel's error can take the device away from its whole process, so benchmarks/on_gpu.py runs each
file in a process of its own.
"""

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from on_device import ON, Trained, train_here

from eke.hardware import detect


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip where there is no CUDA device, so that a stray selection says why."""
    if ON == "cuda" and detect().kind != "cuda":
        pytest.skip("no CUDA device; EKE_GPU_TESTS_ON=cpu runs what a CPU can, small")
    monkeypatch.setenv("LOCAL_RANK", "0")  # DeepSpeed sets it; so that it is taken back afterwards
    monkeypatch.delenv("LOCAL_RANK")
    # A lent GPU comes with other versions of the libraries: what those deprecate is not asked here.
    warnings.simplefilter("default")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Trained]:
    """Overrides -> what their training left; the same ones are trained once per file."""
    known: dict[tuple[str, ...], Trained] = {}

    def run(*overrides: str) -> Trained:
        if overrides not in known:
            folder: Path = tmp_path_factory.mktemp("runs")
            known[overrides] = train_here(folder, *overrides)
        return known[overrides]

    return run
