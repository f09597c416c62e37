"""What a sweep's file knows of a cell before it runs: its row, its round, the rule against it."""

import pytest

from eke.config.sweep import expand
from eke.workflows.sweep import describe_sweep, plan_cells

SMALL = ("data=synthetic", "data.seq_len=32", "data.num_samples=64", "train.steps=20")


def cells_of(*typed: str):
    expanded = expand([*SMALL, "tracker=none", "hardware=cpu", *typed])
    return plan_cells(expanded.cells, "sweep-1", lambda done, total: None)[0], expanded


@pytest.mark.slow
def test_rows_and_rounds_are_planned() -> None:
    rows = "sweep.rows={plain:{},small:{memory:checkpointing}}"
    cells, _ = cells_of(rows, "sweep.repeats=2")
    found = [(cell.row, cell.round) for cell in cells]
    assert found == [("plain", 0), ("small", 0), ("small", 1), ("plain", 1)]


@pytest.mark.parametrize(("rounds", "said"), [("1", "1 run"), ("0,3", "2 runs (2 repeats)")])
def test_run_counts_are_grammatical(rounds, said) -> None:
    cells, expanded = cells_of(f"repeat={rounds}")
    assert describe_sweep(cells, 0, expanded) == said
    assert [cell.round for cell in cells] == [int(text) for text in rounds.split(",")]


@pytest.mark.slow
def test_rejected_run_has_its_rule() -> None:
    cells, _ = cells_of("precision=fp32,tf32")
    assert [(cell.outcome, bool(cell.rule)) for cell in cells] == [("", False), ("refused", True)]
