"""Damaged folders of runs: commands that read them say so, and read the others."""

import json
import os
import shutil
from random import Random

import pytest
from fuzz.mutations import COUNT, SEED, case, damage
from unit.results.report.made import Run, make_run, make_sweep

from eke.cli import main
from eke.results.report.show import file_formats


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A sweep of three runs, and two runs outside of it."""
    folder = tmp_path_factory.mktemp("whole")
    more = {"predicted_step": 1.1, "metrics": {"accuracy": 0.5}}
    runs = [Run({"precision": name}, seed=n, speed=100.0 + n, **more)
            for n, name in enumerate(["fp32", "bf16", "fp32"])]  # fmt: skip
    make_sweep(folder, runs, curve=[3.0, 2.5, 2.0])
    for name in ("a" * 16, "b" * 16):
        make_run(
            folder / name, Run({"optimizer": "sgd"}, reason="no memory", outcome="oom"), [2.0, 1.0]
        )
    for path in folder.glob("*/record.json"):
        record = json.loads(path.read_text())
        plan = {"run_id": path.parent.name, "overrides": record["overrides"], "steps": {"total": 9}}
        (path.parent / "plan.json").write_text(json.dumps(plan))
        (path.parent / "config.yaml").write_text("# seed=1\nseed: 1\n")
        attempt = {"attempt": 0, "pid": 1, "host": "h", "started": 1.0, "machine": {}}
        (path.parent / "attempts.jsonl").write_text(json.dumps(attempt) + "\n")
    return folder


def test_damaged_folder_does_not_stop_a_command(whole, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(file_formats, "vega_script", lambda: "vega")
    monkeypatch.chdir(tmp_path)
    for number in range(COUNT or 50):
        rng = Random(f"{SEED} {number}")
        runs = tmp_path / "runs"
        shutil.copytree(whole, runs)
        files = sorted(runs.glob("*/*"))
        records = [file for file in files if file.name == "record.json"]
        file = rng.choice(records if rng.random() < 0.6 else files)
        how = damage(rng, file)
        with case(f"case {number}: {file.relative_to(tmp_path)} became {how}"):
            assert main(["report", "runs"]) == 0
            found = json.loads((runs / "report.json").read_text())
            reported = {run["folder"] for row in found["configurations"] for run in row["runs"]
                        if run["outcome"] in ("ok", "oom")}  # fmt: skip
            others = {str(record.parent) for record in records if record.parent != file.parent}
            assert others <= reported
            run = str(file.parent)
            others = ("status runs", f"export {run} out", f"logs {run}", "sync runs --dry-run")
            for command in others if COUNT or number % 5 == 0 else ():
                assert main(command.split()) in (0, 1, 2)
        shutil.rmtree(runs)
        shutil.rmtree("out", ignore_errors=True)
        capsys.readouterr()
