"""Published speeds that no rate was fitted to: the other half of the rows, by lengths."""

import statistics
import sys

import pytest
from support import REPO
from unit.estimate.time.cases import large, small

from eke.estimate.time.rates import WORKSTATION_BYTES_PER_S, network_of
from eke.estimate.time.time_history import calibrated_step_time
from eke.hardware import DEVICES

sys.path.insert(0, str(REPO / "benchmarks"))

import llm_foundry  # after the path is there


@pytest.fixture(autouse=True)
def _counted(monkeypatch):
    fresh = {**llm_foundry.passes.counts("counted"), "gpt2": llm_foundry.with_one_gelu_kernel()}
    monkeypatch.setattr(llm_foundry.passes, "counts", lambda name: fresh)


HELD_OUT = {
    "rows of 512 tokens": ("a100_80 3b 512 8 40", "a100_80 350m 512 8 128", "h100 760m 512 8 96"),
    "rows of 16384 and more": (
        "a100_40 1b 32768 8 1", "a100_80 3b 32768 8 3", "h100 3b 16384 8 1", "h100 1b 65536 8 1",
    ),
    "7B on H100": ("h100 7b 2048 8 6", "h100 7b 65536 8 1"),
    "networks": ("h100 13b 2048 16 2", "h100 7b 2048 512 6", "a100_40 3b 2048 64 6"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HELD_OUT)
def test_held_out_speeds_are_predicted(kind) -> None:
    lines = llm_foundry.table()
    ratios = []
    for name in HELD_OUT[kind]:
        row = llm_foundry.row_of(next(r for r in lines if llm_foundry.name_of(r) == name))
        found = calibrated_step_time(row.plan)
        ratios.append(found.step_s.expected / row.measured)
    assert 0.85 < statistics.geometric_mean(ratios) < 1.15, ratios
    assert all(0.8 < ratio < 1.25 for ratio in ratios), ratios


TWO = ("distributed=fsdp", "distributed.num_processes=16", "distributed.num_nodes=2")


@pytest.mark.parametrize(
    ("option", "gbit"), [("a100_80", 1600), ("h100", 3200), ("v100_16", 400), ("rtx3090", None)]
)
def test_network_comes_from_the_device_or_the_override(option, gbit) -> None:
    plan = large(*TWO, device=llm_foundry.replace(DEVICES[option], count=8))
    expected = gbit * 1e9 / 8 if gbit else WORKSTATION_BYTES_PER_S
    assert network_of(plan)[0] == pytest.approx(expected)
    found = calibrated_step_time(plan)
    assert any("network of each node" in note for note in found.notes)
    typed = large(*TWO, "hardware.network_gbit_per_s=1", device=plan.device)
    slow = calibrated_step_time(typed)
    # All but a part of 16 is sent, at three quarters of 1 Gbit/s; half of it is hidden at most.
    sent = found.parts["communication"] if gbit is None else None
    assert slow.parts["communication"] > (5 * sent if sent else 0.5)
    assert typed.run_id == plan.run_id


def test_single_node_run_has_no_network() -> None:
    found = calibrated_step_time(small())
    assert not any("network" in note for note in found.notes)
