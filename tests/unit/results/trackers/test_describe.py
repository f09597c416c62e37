"""What trackers are told of a whole run."""

import json

import pytest
from unit.plan.record.samples import eval_row, step_row

from eke.common.paths import RunPaths
from eke.config.schema import Tracker
from eke.plan.record import MeasuredMemory, MemoryRecord, Spread, Throughput, Timing
from eke.results.trackers import summary_values
from eke.results.trackers.tracker import tracked_run

from .conftest import RUN_ID, make_record

SPEEDS = {"samples_per_s": 80.0, "tokens_per_s": 160.0, "mfu_frac": 0.25, "steady_step_s": 0.1}


@pytest.mark.parametrize("shared", [True, False, None])
def test_run_on_a_shared_device_reports_no_speed(shared):
    record = make_record(
        throughput=Throughput(samples_per_s=80.0, tokens_per_s=160.0, mfu_frac=0.25),
        timing=Timing(steady_step_s=Spread(0.1, 0.1, 0.1, 3)),
        shared_device=shared,
    )
    values = summary_values(record)
    assert {key: values[key] for key in SPEEDS if key in values} == ({} if shared else SPEEDS)
    assert values["eval_final"] == 0.1 + 0.2


def in_sweep(folder, overrides, row=""):
    """The tracked run of a record, one of two runs of a sweep."""
    common = ["experiment=smoke", "tracker.group=sweep-1"]
    cells = [
        {"run_id": RUN_ID, "overrides": [*common, *overrides], "row": row},
        {"run_id": "f" * 16, "overrides": [*common, "optimizer.lr=0.1"], "row": ""},
    ]
    (folder / "sweep-1").mkdir()
    (folder / "sweep-1" / "sweep.json").write_text(json.dumps({"cells": cells}))
    record = make_record(
        run_id=RUN_ID,
        overrides=[*common, *overrides],
        choices={"optimizer": "lion", "precision": "fp32"},
        config={"optimizer": {"lr": 0.25}, "seed": 3, "repeat": 2},
        environment={"git": {"commit": "abc"}},
    )
    return tracked_run(record, RunPaths(folder / RUN_ID), 0, Tracker(group="sweep-1"))


def test_tracker_name_of_a_run_lists_differing_overrides(tmp_path):
    found = in_sweep(tmp_path, ["optimizer=lion", "optimizer.lr=0.25", "seed=3"])
    assert found.name == "optimizer=lion optimizer.lr=0.25 seed=3"
    assert found.told == {"optimizer": "lion", "optimizer.lr": 0.25, "seed": 3, "repeat": 2}
    own = {"precision": "fp32", "commit": "abc", "device": "cpu"}
    assert found.factors == {**found.told, **own}


def test_row_is_part_of_the_name_and_a_factor(tmp_path):
    found = in_sweep(tmp_path, ["seed=3"], row="slow")
    assert (found.name, found.factors["row"]) == ("slow: seed=3", "slow")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"cells": [1]}', '{"cells": [{}]}'])
def test_unreadable_sweep_keeps_all_overrides(tmp_path, content):
    (tmp_path / "sweep-1").mkdir()
    (tmp_path / "sweep-1" / "sweep.json").write_text(content)
    record = make_record(overrides=["seed=3", "optimizer=lion"])
    found = tracked_run(record, RunPaths(tmp_path / RUN_ID), 0, Tracker(group="sweep-1"))
    assert found.name == "seed=3 optimizer=lion"


def test_best_evaluation_tokens_and_gib_are_in_the_summary():
    rows = [
        step_row(1),
        eval_row(1, 2.0),
        step_row(2),
        eval_row(2, 1.5),
        step_row(3),
        eval_row(3, 1.75),
    ]
    memory = MemoryRecord(measured=MeasuredMemory(peak_allocated_bytes=3 << 29))
    found = summary_values(make_record(memory=memory), rows)
    assert (found["eval_best"], found["tokens"], found["peak_allocated_gib"]) == (1.5, 300, 1.5)
