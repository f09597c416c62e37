"""A sweep's file, its identity, and what its cells amount to."""

import dataclasses
import json

import pytest

from eke.launch.sweep import (
    Cell,
    merge_duplicates,
    sweep_exit_code,
    sweep_id,
    sweep_paths,
    write_sweep,
)

CELLS = [("precision=bf16",), ("precision=fp16", "seed=1")]


def test_the_same_command_is_the_same_sweep() -> None:
    assert sweep_id(CELLS) == sweep_id(list(CELLS))
    others = [CELLS[::-1], CELLS[:1], [("precision=bf16", "precision=fp16"), ("seed=1",)]]
    assert len({sweep_id(cells) for cells in (CELLS, *others)}) == 4
    assert len(sweep_id(CELLS)) == 12


def test_the_file_holds_every_cell(tmp_path) -> None:
    paths = sweep_paths(str(tmp_path / "runs"), "abc")
    assert paths.sweep == tmp_path / "runs" / "sweep-abc" / "sweep.json"
    cells = [
        Cell(CELLS[0], run_id="1", folder="runs/1", outcome="ok", reused=True),
        Cell(CELLS[1], outcome="refused", reason="bf16_needs_ampere"),
    ]
    write_sweep(paths, ["python", "train.py", "-m"], cells)
    content = json.loads(paths.sweep.read_text())
    assert content["command"] == ["python", "train.py", "-m"]
    assert [c["overrides"] for c in content["cells"]] == [list(cell) for cell in CELLS]
    assert [c["outcome"] for c in content["cells"]] == ["ok", "refused"]
    assert content["cells"][1]["reason"] == "bf16_needs_ampere"


def test_cells_that_are_the_same_run_are_merged(plan) -> None:
    other = dataclasses.replace(plan, run_id="f" * 16)
    assert merge_duplicates([plan, None, other, plan, None, other, plan]) == {3: 0, 5: 2, 6: 0}
    assert merge_duplicates([]) == {}


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        (["ok", "ok"], 0),
        (["ok", "refused"], 0),
        (["ok", "skipped"], 0),
        (["ok", "oom"], 1),
        (["ok", "crashed"], 1),
        (["ok", "cancelled"], 75),
        (["oom", "preempted"], 75),
        (["ok", ""], 75),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
def test_what_a_sweep_exits_with(outcomes, code) -> None:
    assert sweep_exit_code([Cell((), outcome=outcome) for outcome in outcomes]) == code
