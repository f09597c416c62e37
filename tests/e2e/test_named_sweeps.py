"""Every named sweep, small, from its file to the records of its runs."""

import json

import pytest
from live import record_of
from named_sweeps import FILES, planned, words_before, words_of
from unit.training.model.test_optimizer import COMPILED

from eke.plan.planner import Plan
from eke.rules import RULES

FASTER = ("experiment=small", "train.steps=4", "data.seq_len=32", "tracker=none", "sweep.repeats=1")
"""The same models; what a step does, four show."""

ENDS = {("demo", "diverges"): "diverged"}
"""Jobs that end in another way than ok, on purpose."""


def is_compiled(plan: Plan) -> bool:
    """Into C++, for half a minute: see test_memory_truth.py and test_optimizer_convergence.py."""
    return plan.config.compile.option == "inductor" or plan.config.optimizer.option in COMPILED


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_every_sweep_row_runs_or_is_rejected_by_a_rule(name, train_plan) -> None:
    cells, plans = planned(f"sweep={name}", *FASTER)
    ids = {rule.id for rule in RULES}
    done = words_before(name)
    trained: set[str] = set()
    for cell, plan in zip(cells, plans, strict=True):
        if plan is None:
            assert cell.rule in ids, cell.reason
            continue
        new = words_of(cell.overrides) - done
        if is_compiled(plan) or not new:
            continue
        done |= new
        if plan.run_id in trained:  # of two rows that are one run
            continue
        trained.add(plan.run_id)
        record = record_of(train_plan(plan, ENDS.get((name, cell.row), "ok")))
        assert record["config"]["model"]["family"] == plan.config.model.family
    assert trained, "not one of them runs here"


@pytest.mark.slow
def test_named_sweep_runs_from_the_command_line(train_py, tmp_path) -> None:
    done = train_py("-m", "sweep=nvlink", "sweep.exclude=[row=ddp_without_nvlink]", *FASTER)
    assert done.code == 0, done.text
    (file,) = tmp_path.glob("runs/sweep-*/sweep.json")
    content = json.loads(file.read_text())
    assert content["name"] == "nvlink"
    found = {cell["row"]: (cell["outcome"], cell["rule"]) for cell in content["cells"]}
    assert found == {
        "dp": ("refused", "dp_needs_two_gpus"),
        "ddp": ("ok", ""),
    }
