"""`eke fit` as it is typed: trials run, the best is written, and typing it again runs nothing."""

import json
import signal
import subprocess
import sys

import pytest
from forked_workers import run
from live import SHORT, run_in
from support import DIVERGES, PATIENCE_S, REPO, Finished, environment, last_wins

from eke import cli

WORK = last_wins(*SHORT, "attention=sdpa", "compile=none", "kernels=none", "batch.per_device=2",
                 "batch.accumulation=2", "train.steps=5000")  # fmt: skip

FIT = ("fit", "--config-dir", "mine")
FORKING = (sys.executable, str(REPO / "tests" / "forked_workers.py"))


@pytest.fixture
def fit(tmp_path):
    """`eke fit ...` in a folder of its own, with options of its own."""
    (tmp_path / "mine").mkdir()

    return lambda *arguments: run(tmp_path, *FIT, *arguments)


@pytest.fixture
def fit_here(tmp_path, monkeypatch, capsys):
    """The same in this process, for what plans or rejects and trains not."""
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)

    def run(*arguments: str) -> Finished:
        try:
            code = cli.main([*FIT, *arguments])
        except SystemExit as ended:  # argparse's
            code = ended.code
        said = capsys.readouterr()
        return Finished(code, said.out, said.err)

    return run


def values_of(tmp_path):
    (file,) = tmp_path.glob("runs/sweep-*/fit.json")
    return json.loads(file.read_text())


@pytest.mark.slow
def test_fit_tries_confirms_and_resumes_after_ctrl_c(fit, train_forked, tmp_path) -> None:
    typed = (*WORK, "--budget-trials", "3", "--name", "found", "--objective", "memory")
    with subprocess.Popen(
        [*FORKING, *FIT, *typed], cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    ) as live:  # fmt: skip
        assert live.stdout is not None
        for line in live.stdout:
            if line.startswith("trial 2"):
                live.send_signal(signal.SIGINT)
                break
        out = live.stdout.read()
        assert live.wait(PATIENCE_S) == 75, out
    assert "the same command continues" in out

    done = fit(*typed)
    assert done.code == 0, done.text
    assert "answered from its record" in done.err
    values = values_of(tmp_path)
    assert values["trials"][0]["configuration"] == "baseline"
    assert len(values["trials"]) == 3
    assert {trial["outcome"] for trial in values["trials"]} == {"ok"}
    peaks = [trial["trial"]["peak_bytes"] for trial in values["trials"]]
    assert values["gain"]["factor"] == pytest.approx(peaks[0] / min(peaks))
    assert values["gain"]["factor"] > 1.05, "smaller micro-batches and checkpointing need less"
    assert "less peak memory than the baseline" in done.out
    assert "experiment=found" in done.out

    (folder,) = tmp_path.glob("runs/sweep-*")
    sweep = json.loads((folder / "sweep.json").read_text())
    assert len(sweep["cells"]) == len(values["trials"])

    again = fit(*typed)
    assert again.code == 0, again.text
    assert again.err.count("answered from its record") == len(values["trials"])

    plan = train_forked("-v", "--config-dir", "mine", "experiment=found", "plan_only=true")
    assert plan.code == 0, plan.text
    for text in values["best"]:
        key, _, value = text.partition("=")
        if key == "batch.per_device":
            assert f"{value} per device" in plan.out

    reported = run_in(
        tmp_path, [sys.executable, "-m", "eke", "report", str(folder), "--provenance"]
    )
    assert reported.code == 0, reported.err
    assert "eke fit --config-dir mine" in reported.out
    assert (folder / "fit.md").read_text().startswith("# eke fit --config-dir mine")


@pytest.mark.slow
def test_diverging_trial_is_not_repeated(fit, tmp_path) -> None:
    done = fit(*last_wins(*WORK, *DIVERGES, "train.steps=50"))
    assert done.code == 1, done.text
    assert done.text.count("diverged:") == 1, done.text
    assert "Lower optimizer.lr" in done.out
    assert not list(tmp_path.glob("mine/experiment/*"))


@pytest.mark.slow
def test_declared_hardware_requires_plan_only(fit_here) -> None:
    refused = fit_here(*WORK, "hardware=h100")
    assert refused.code == 2
    assert "plan_only=true" in refused.err
    planned = fit_here(*WORK, "hardware=h100", "plan_only=true")
    assert planned.code == 0, planned.text
    assert "baseline" in planned.out


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        pytest.param(["--objective", "fast"], "speed", id="objective"),
        pytest.param(["--budget-trials", "1"], "1 is below 2", id="budget"),
        pytest.param(["precison=bf16"], "precision=bf16", id="key"),
        pytest.param(["seed=1,2"], "one value, or remove the key", id="a sweep"),
        pytest.param(
            ["--name", "a", "-m", "seed=1"],
            "eke fit --config-dir mine --name a seed=1",
            id="multirun",
        ),
        pytest.param(["sweep=demo"], "python train.py -m sweep=demo", id="a named sweep"),
        pytest.param(["sweep.repeats=2"], "is for a set of runs", id="a sweep's key"),
        pytest.param(["--cfg", "job"], "python train.py --cfg job", id="a question for Hydra"),
    ],
)
def test_invalid_fit_command_starts_no_run(fit_here, arguments, word, tmp_path) -> None:
    done = fit_here(*arguments)
    assert done.code == 2, done.text
    assert word in done.text
    assert "Traceback" not in done.text
    assert not (tmp_path / "runs").exists()
