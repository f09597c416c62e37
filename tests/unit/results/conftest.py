"""A W&B server, and the environment of a user who has an account there or none."""

import os

import pytest
from unit.results.trackers.stub import serving


@pytest.fixture(autouse=True)
def clean_environment():
    """Nobody's account, server or settings; what W&B or eke sets itself is undone."""
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        del os.environ[name]
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def server():
    with serving() as server:
        yield server


@pytest.fixture
def online(server, monkeypatch):
    """The server, with the environment of a user who has an account there."""
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", "ab" * 20)
    return server
