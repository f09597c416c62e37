"""A real SLURM, one for the whole session, which tests take in turns."""

import os
from collections.abc import Iterator

import pytest
from slurm_support import Cluster, NoClusterError, shared, turn


@pytest.fixture(scope="session")
def session_cluster() -> Iterator[Cluster]:
    """The cluster of all of pytest's workers; a skip where there can be none, in CI an error."""
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))[:12]
    try:
        with shared(session, {"MINICLUSTER_GRACE": "5"}) as cluster:
            yield cluster
    except NoClusterError as error:
        if os.environ.get("EKE_CI"):
            raise
        pytest.skip(f"no SLURM here: {error}")


@pytest.fixture
def cluster(session_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """An empty SLURM with accounting, for one test; SLURM_CONF names it."""
    with turn(session_cluster):
        monkeypatch.setenv("SLURM_CONF", str(session_cluster.conf))
        yield session_cluster
