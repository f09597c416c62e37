"""Nobody's account, and the runs of a sweep."""

import pytest
from unit.results.report.wandb_report.runs import make_sweep, three_repeats


@pytest.fixture(autouse=True)
def no_account(clean_environment, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens


@pytest.fixture
def sweep(tmp_path):
    """Two precisions, three times each, in one group."""
    return make_sweep(tmp_path / "runs", three_repeats())
