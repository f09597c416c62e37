"""Preparations of these tests go into a cache of their own, and happen in this process."""

import pytest

import eke.data.sources.request as asking
from eke.data.preparation.rows import prepare_store

IN_ANOTHER_PROCESS = asking._run_preparation


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """An empty cache folder per test."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    """A process of its own takes seconds to import the libraries that are here already."""
    monkeypatch.setattr(asking, "_run_preparation", prepare_store)


@pytest.fixture
def in_another_process(in_this_process, monkeypatch):
    """For what crosses the border: errors, an emptied cache, changed data."""
    monkeypatch.setattr(asking, "_run_preparation", IN_ANOTHER_PROCESS)
