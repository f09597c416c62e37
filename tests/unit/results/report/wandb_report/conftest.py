"""Nobody's account, or one at a server on the loopback interface."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from unit.results.report.wandb_report.runs import make_sweep, three_repeats


@pytest.fixture(autouse=True)
def clean_environment(tmp_path: Path) -> Iterator[None]:
    """No account and no server; what W&B or eke sets itself is undone."""
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        del os.environ[name]
    os.environ["HOME"] = str(tmp_path)
    os.environ["WANDB_BASE_URL"] = "http://127.0.0.1:9"  # nobody listens
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Two precisions, three times each, in one group."""
    return make_sweep(tmp_path / "runs", three_repeats())
