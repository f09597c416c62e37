"""A W&B server, and the environment of a user who has an account there."""

import pytest
from unit.results.trackers.stub import serving


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
