"""What is found under a folder: everything, and what cannot be read is said."""

import json
import shutil

import pytest
from unit.results.report.made import Run, make_run, make_sweep

from eke.common.errors import ConfigError
from eke.common.paths import RunPaths, SweepPaths
from eke.results.report.compare.load_records import NOT_RUN, UNREADABLE, gather

RUNS = [
    Run({"precision": "fp32"}),
    Run({"precision": "bf16"}, outcome="oom", reason="out of memory in forward", speed=None),
    Run({"precision": "fp16"}, outcome="refused", reason="needs a GPU"),
    Run({"precision": "fp8"}, outcome="not run"),
]


def outcomes(gathered):
    return [(entry.outcome, entry.reason) for entry in gathered.entries]


def test_sweep_lists_every_run_in_order(tmp_path):
    found = gather([make_sweep(tmp_path, RUNS, rows=["a", "b", "c", "d"], name="ladder")])
    assert outcomes(found) == [
        ("ok", ""),
        ("oom", "out of memory in forward"),
        ("refused", "needs a GPU"),
        (NOT_RUN, ""),
    ]
    assert [entry.row for entry in found.entries] == ["a", "b", "c", "d"]
    assert (found.sweeps, found.commands) == (("ladder",), (("-m", "precision=fp32,bf16"),))
    assert found.notes == ()


def test_unstarted_run_is_listed_with_its_reason(tmp_path):
    sweep = make_sweep(tmp_path, [RUNS[0], Run({"precision": "bf16"}, outcome="not run")])
    file = SweepPaths(sweep).sweep
    content = json.loads(file.read_text())
    for cell in content["cells"]:
        cell |= {"outcome": "crashed", "reason": "sbatch: Invalid partition", "rule": "a_rule"}
    file.write_text(json.dumps(content))
    told = ("crashed", "sbatch: Invalid partition")
    found = gather([sweep])
    assert outcomes(found) == [("ok", ""), told], "a record is the truth"
    assert [entry.rule for entry in found.entries] == ["", "a_rule"], "it was started since"


def test_copied_sweep_without_runs_is_noted(tmp_path):
    sweep = make_sweep(tmp_path / "there", RUNS)
    copy = shutil.copytree(sweep, tmp_path / "here" / sweep.name)
    found = outcomes(gather([copy]))
    gone = tmp_path / "here" / f"{0:016x}"
    said = f"ok according to its sweep, but {gone} is missing (moved or not copied?)"
    assert [outcome for outcome, _ in found] == [NOT_RUN, NOT_RUN, "refused", NOT_RUN]
    assert (found[0][1], found[3][1]) == (said, "")


@pytest.mark.parametrize("given", ["runs", "both", "run and sweep"])
def test_run_counts_once_for_any_path(tmp_path, given):
    sweep = make_sweep(tmp_path, RUNS)
    folders = {
        "runs": [tmp_path],
        "both": [sweep, tmp_path],
        "run and sweep": [tmp_path / f"{0:016x}", sweep],
    }[given]
    assert len(gather(folders).entries) == len(RUNS)
    shutil.copytree(sweep, tmp_path / "sweep-ffffffffffff")
    # What never ran has no folder by which to tell that it is the same.
    assert [e.outcome for e in gather([tmp_path]).entries].count("ok") == 1


@pytest.mark.parametrize("name", ["{}-copy", "{}-2", "backup/{}"])
def test_copied_run_counts_once_and_is_noted(tmp_path, name):
    run = make_run(tmp_path / f"{0:016x}", RUNS[0])
    again = make_run(tmp_path / f"{0:016x}-3", Run({"precision": "fp32"}, speed=7.0))
    copy = tmp_path / name.format(run.name)
    shutil.copytree(run, copy)
    found = gather([tmp_path, copy.parent])
    assert [entry.folder for entry in found.entries] == [run, again], "a repeat is no copy"
    assert found.notes == (f"{copy}: a copy of {run}, counted once",)


def test_moved_sweep_is_read(tmp_path):
    make_sweep(tmp_path / "runs", RUNS)
    shutil.move(tmp_path / "runs", tmp_path / "elsewhere")
    found = gather([tmp_path / "elsewhere" / "sweep-0123456789ab"])
    assert [entry.outcome for entry in found.entries] == ["ok", "oom", "refused", NOT_RUN]


@pytest.mark.parametrize("content", ["{", "[]", '{"schema_version": 99}', "\x00\xff"])
def test_unreadable_record_is_shown(tmp_path, content):
    sweep = make_sweep(tmp_path, RUNS)
    RunPaths(tmp_path / f"{0:016x}").record.write_text(content)
    found = gather([sweep])
    assert found.entries[0].outcome == UNREADABLE
    assert f"{0:016x}" in found.notes[0]
    assert len(found.entries) == len(RUNS)


@pytest.mark.parametrize("content", ["{", "[]", '{"cells": 3}', '{"cells": [3, null]}'])
def test_runs_of_a_torn_sweep_are_read_from_their_folders(tmp_path, content):
    sweep = make_sweep(tmp_path, RUNS)
    SweepPaths(sweep).sweep.write_text(content)
    found = gather([tmp_path])
    assert [entry.outcome for entry in found.entries] == ["ok", "oom"]
    assert any("sweep.json" in note for note in found.notes) or "null" in content


def test_single_and_started_runs_are_gathered(tmp_path):
    run = make_run(tmp_path / "one", Run())
    assert outcomes(gather([run])) == [("ok", "")]
    begun = tmp_path / "two"
    begun.mkdir()
    RunPaths(begun).plan.write_text('{"overrides": ["precision=bf16"]}')
    found = gather([tmp_path])
    assert [(e.outcome, e.overrides) for e in found.entries][1] == (NOT_RUN, ("precision=bf16",))


@pytest.mark.parametrize(
    ("make", "why"),
    [(lambda path: None, "no such folder"), (lambda path: path.mkdir(), "no readable run")],
)
def test_folder_without_runs_is_an_error(tmp_path, make, why):
    make(tmp_path / "none")
    with pytest.raises(ConfigError, match=why):
        gather([tmp_path / "none"])
