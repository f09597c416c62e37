"""Runs and sweeps by the beginning of their names."""

import json
from pathlib import Path

import pytest

from eke.common.errors import ConfigError
from eke.plan.record.find_folder import find_folder

FIRST, SECOND = "18468d6c11112222", "18468d6c33334444"


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in (FIRST, SECOND, f"{SECOND}-2", "9dfebed7d5fce6b0"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "plan.json").write_text("{}")
    sweep = tmp_path / "runs" / "sweep-3d6e0af9eac4"
    sweep.mkdir()
    cells = [{"run_id": FIRST, "folder": ""}, {"run_id": "x", "folder": "runs/9dfebed7d5fce6b0"}]
    (sweep / "sweep.json").write_text(json.dumps({"cells": cells}))
    (tmp_path / "runs" / "9dother").mkdir()
    return tmp_path / "runs"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("9d", "runs/9dfebed7d5fce6b0"),
        ("runs/9df", "runs/9dfebed7d5fce6b0"),
        ("sweep-3d", "runs/sweep-3d6e0af9eac4"),
        ("3d6e", "runs/sweep-3d6e0af9eac4"),
        (SECOND, f"runs/{SECOND}"),
        ("runs/sweep-3d6e0af9eac4/1846", f"runs/{FIRST}"),
        ("runs/sweep-3d6e0af9eac4/9d", "runs/9dfebed7d5fce6b0"),
        ("runs", "runs"),
        ("nowhere", "nowhere"),
        ("runs/nowhere/", "runs/nowhere"),
        ("missing/9d", "missing/9d"),
        (".", "."),
    ],
    ids=["plain", "path", "sweep", "sweep by digits", "whole name", "of a sweep",
         "folder in a sweep", "folder of runs", "no match", "no match in folder", "no folder",
         "current folder"],
)  # fmt: skip
def test_unique_beginning_is_enough(text, found) -> None:
    assert find_folder(text) == Path(found)


@pytest.mark.parametrize(("text", "count"), [("1846", 3), (SECOND[:12], 2), ("runs/1846", 3)])
def test_several_matches_are_listed(text, count) -> None:
    with pytest.raises(ConfigError) as error:
        find_folder(text, "RUN")
    (problem,) = error.value.problems
    assert (problem.key, problem.id) == ("RUN", "ambiguous")
    assert problem.why.count("18468d6c") == count
    assert f"{SECOND}-2" in problem.why


def test_damaged_sweep_has_no_matches(runs) -> None:
    (runs / "sweep-3d6e0af9eac4" / "sweep.json").write_text("[]")
    assert find_folder(text := "runs/sweep-3d6e0af9eac4/1846") == Path(text)
