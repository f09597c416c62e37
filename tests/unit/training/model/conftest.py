"""Fixtures of this folder."""

import pytest

import eke.data.sources.request as asking
from eke.data.preparation.rows import prepare_store


@pytest.fixture
def own_cache(tmp_path, monkeypatch) -> None:
    """Preparations happen in this process, into an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(asking, "_prepare", prepare_store)
