"""The fault campaign on a real SLURM, in its short form."""

import pytest
from faults import campaign

FAULTS = 3


@pytest.mark.slow
def test_cluster_fault_campaign(cluster, tmp_path) -> None:
    counts = campaign("slurm", FAULTS, seed=11, root=tmp_path)
    assert counts.total() == FAULTS
