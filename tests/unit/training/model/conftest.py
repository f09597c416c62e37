"""Fixtures of this folder."""

import pytest
from checkpoints import FAMILIES, save_checkpoint

import eke.data.sources.request as asking
from eke.data.preparation.rows import prepare_store


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Family -> a checkpoint that no test changes."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {family: save_checkpoint(root / family, family) for family in FAMILIES}


@pytest.fixture
def own_cache(tmp_path, monkeypatch) -> None:
    """Preparations happen in this process, into an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(asking, "_run_preparation", prepare_store)
