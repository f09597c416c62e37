"""A step in which the compiler ran is no steady step, whenever it happens."""

import pytest
from support import TINY

from eke.plan.record import metrics


def flags(tmp_path) -> list[bool]:
    (file,) = tmp_path.glob("*/metrics.jsonl")
    rows, _ = metrics.read_rows(file)
    return [metrics.WARMUP in row for row in metrics.latest(rows, metrics.LOSS)]


RAGGED = (
    *TINY, "data=synthetic", "data.lengths=uniform", "data.min_len=5", "data.seq_len=40",
    "data.num_samples=8", "data.num_eval_samples=1", "batch.per_device=1", "train.steps=8",
    "train.timing_warmup_steps=2", "train.save_final=false",
)  # fmt: skip
ONE_LAYER = ("model.num_hidden_layers=1",)
EVEN = tuple(text for text in RAGGED if text not in ("data.lengths=uniform", "data.min_len=5"))


@pytest.mark.slow
def test_recompiled_steps_are_excluded(curve_of, tmp_path) -> None:
    """One sample a step, each of another length: the compiler meets new shapes."""
    curve_of(*RAGGED, *ONE_LAYER, "compile=eager")
    found = flags(tmp_path)
    assert found[:2] == [True, True]
    assert not all(found), "dynamic shapes settle after a recompilation or two"


def test_uncompiled_run_excludes_only_warm_up(curve_of, tmp_path) -> None:
    curve_of(*EVEN)
    assert flags(tmp_path) == [True, True] + [False] * 6


def test_memory_profile_step_is_excluded(curve_of, tmp_path) -> None:
    curve_of(*RAGGED)
    found = flags(tmp_path)
    assert found[:2] == [True, True]
    assert found[2:].count(True) == 1, "the longest sample's"


@pytest.mark.slow
def test_late_new_graph_is_detected(curve_of, tmp_path, monkeypatch) -> None:
    import eke.training.observe.observe_run as look

    counts = iter([1, 1, 1, 1, 1, 1, 1, 1, 1, 2, *([2] * 10)])  # before and after each step
    monkeypatch.setattr(look, "num_graphs", lambda plan: next(counts))
    curve_of(*EVEN, *ONE_LAYER, "compile=eager")
    assert flags(tmp_path) == [True, True, False, False, True, False, False, False]
