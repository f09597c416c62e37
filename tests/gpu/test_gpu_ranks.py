"""Two devices train like one. On a CPU two processes do, but for what only GPUs have."""

import pytest
from equivalence_compare import largest_difference
from live import record_of, run_folders
from on_device import BASE, ON, plan_here
from support import last_wins

from eke.plan.record import metrics

pytestmark = pytest.mark.gpu

STRATEGIES = ("dp", "ddp", "fsdp", "zero2", "zero3")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_devices_match_one(strategy, trained, train_py, tmp_path) -> None:
    shared = (f"distributed={strategy}", "distributed.num_processes=2", "batch.per_device=2")
    plan_here(*shared)  # skips, with the rule's words
    done = train_py(*last_wins(*BASE, *shared, f"hardware={'cpu' if ON == 'cpu' else 'auto'}"))
    assert done.code == 0, done.text
    (folder,) = run_folders(tmp_path)
    rows, _ = metrics.read_rows(folder / "metrics.jsonl")
    two = [(r[metrics.LOSS], r[metrics.GRAD_NORM]) for r in metrics.latest(rows, metrics.LOSS)]
    assert largest_difference(trained().curve, two) < 1e-4


@pytest.mark.parametrize("p2p", ["auto", "off"])
def test_ranks_record_peer_access(p2p, train_py, tmp_path) -> None:
    if ON == "cpu":
        pytest.skip("NCCL moves data between GPUs only")
    shared = ("distributed=ddp", "distributed.num_processes=2", f"distributed.p2p={p2p}")
    plan_here(*shared)
    done = train_py(*last_wins(*BASE, *shared))
    assert done.code == 0, done.text
    record = record_of(run_folders(tmp_path)[0])
    assert record["effective"]["nccl_p2p"] == [p2p, p2p]
