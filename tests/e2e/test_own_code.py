"""Own code in whole runs: sweeps, edits while they go, kills, and the name of a run."""

import json
import os
import shutil
import signal
import sys
import time

import pytest
from forked_workers import run
from live import attempts, curve, record_of
from support import REPO

from eke.estimate.memory import stop_tracing
from eke.extend import examples

pytestmark = pytest.mark.slow

STRANGERS = REPO / "tests" / "strangers"
CHARS = (
    "model=custom", "model.target=chars.model.Decoder", "model.args.config.hidden=16",
    "data=custom", "data.target=chars.data.Rows", "loss.per=y", "batch.per_device=4",
    "train.steps=4", "tracker=none", "train.eval_every=2",
)  # fmt: skip


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """The decoder's project in the current folder."""
    shutil.copytree(STRANGERS / "chars" / "chars", tmp_path / "chars")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Other tests import the projects from where they are.
    monkeypatch.setattr(sys, "path", [p for p in sys.path if not p.startswith(str(STRANGERS))])
    stop_tracing()  # its process would use the cache of another test
    yield tmp_path
    stop_tracing()


def single_runs(tmp_path, name="runs"):
    return sorted(p for p in (tmp_path / name).iterdir() if (p / "plan.json").exists())


def test_sweep_over_an_argument_is_planned_trained_and_answered(train_forked, tmp_path) -> None:
    typed = ("-m", *CHARS, "model.args.config.depth=1,2", "metrics.bits.target=chars.metrics.Bits")
    done = train_forked(*typed)
    assert done.code == 0, done.text
    records = [record_of(run) for run in single_runs(tmp_path)]
    assert [record["outcome"] for record in records] == ["ok", "ok"]
    sizes = {record["plan"]["size"]["num_parameters"] for record in records}
    assert len(sizes) == 2
    assert all("bits/mean" in record["metrics"] for record in records)
    again = train_forked(*typed)
    assert again.err.count("answered from its record") == 2, again.text


def test_edit_in_the_middle_of_a_sweep_changes_no_run(start, tmp_path) -> None:
    live = start("-m", *CHARS, "train.steps=60", "seed=0,1", "paths.runs=runs", "train.log_every=1")
    live.wait_for_more(3)
    (tmp_path / "chars" / "model.py").write_text("raise SystemExit\n")
    out = live.finish()
    assert live.process.returncode == 0, out
    assert [record_of(run)["outcome"] for run in single_runs(tmp_path)] == ["ok", "ok"]
    frozen = {(run / "code" / "chars.model.py").read_bytes() for run in single_runs(tmp_path)}
    assert frozen == {(STRANGERS / "chars" / "chars" / "model.py").read_bytes()}


@pytest.mark.parametrize("workers", [0, 2])
def test_killed_run_continues_bit_for_bit(start, train_forked, tmp_path, workers) -> None:
    typed = (
        *CHARS, "model.args.config.dropout=0.1", "train.steps=40", "train.log_every=1",
        "train.checkpoint_every=5", f"dataloader.workers={workers}", "train.eval_every=20",
        "metrics.bits.target=chars.metrics.Bits", "callbacks.texts.target=chars.watch.Texts",
    )  # fmt: skip
    whole = train_forked(*typed, "paths.runs=whole")
    assert whole.code == 0, whole.text
    live = start(*typed, "paths.runs=runs")
    live.wait_for_more(12)
    worker = live.worker_pid()
    live.process.send_signal(signal.SIGKILL)
    os.kill(worker, signal.SIGKILL)
    live.finish()
    while (again := train_forked(*typed, "paths.runs=runs")).code == 16:
        time.sleep(1)  # loader processes hold the folder's lock until they miss their parent
    assert again.code == 0, again.text
    (expected,), (found,) = single_runs(tmp_path, "whole"), single_runs(tmp_path, "runs")
    assert len(attempts(found)) == 2
    assert curve(found) == curve(expected)
    assert record_of(found)["metrics"] == record_of(expected)["metrics"]
    texts = [run / "callbacks" / "texts" / "texts.txt" for run in (expected, found)]
    assert texts[0].read_text().splitlines()[-1] == texts[1].read_text().splitlines()[-1]


def planned_id(train_main, *typed):
    done = train_main(*typed, "plan_only=true", "--json")
    assert done.code == 0, done.text
    return json.loads(done.out)["run_id"]


def test_name_of_a_run_depends_on_what_is_named(train_main, tmp_path) -> None:
    def name(*more, of=CHARS):
        return planned_id(train_main, *of, *more)

    first = name()
    assert name("model.target=chars.model:Decoder") == first
    (tmp_path / "chars" / "unused.py").write_text("x = 1\n")
    assert name() == first
    conf = tmp_path / "conf" / "model"
    conf.mkdir(parents=True)
    (conf / "net.yaml").write_text("_target_: chars.model.Decoder\nconfig:\n  hidden: 16\n")
    in_file = ("--config-dir", "conf", "model=net", *CHARS[3:])
    assert name(of=in_file) == first
    assert name("model.args.config.depth=3") != first
    assert name("data.args.length=12") != first
    model = tmp_path / "chars" / "model.py"
    model.write_text(model.read_text().replace("nn.GELU", "nn.ReLU"))
    assert name() != first


def test_callback_changes_no_loss(train_forked, tmp_path) -> None:
    for number, more in enumerate(((), ("callbacks.texts.target=chars.watch.Texts",))):
        done = train_forked(*CHARS, *more, f"paths.runs=runs{number}")
        assert done.code == 0, done.text
    (plain,), (watched,) = (single_runs(tmp_path, f"runs{number}") for number in (0, 1))
    assert curve(plain) == curve(watched)


def test_examples_of_every_interface_run(train_forked, tmp_path) -> None:
    """Loss and metric take a tensor, and the model's example returns its loss."""
    plain = """class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x):
        return self.layer(x)[:, 0]"""
    code = ["import torch\nfrom torch import nn", *dict(examples()).values(), plain]
    (tmp_path / "mine.py").write_text("\n\n\n".join(code) + "\n")
    shared = ("model=custom", "data=custom", "data.target=mine.data", "train.steps=20",
              "tracker=none", "batch.per_device=4")  # fmt: skip
    done = train_forked(
        *shared, "model.target=mine.Model", "callbacks.stop.target=mine.Callback",
        "optimizer=custom", "optimizer.target=mine.optimizer", "optimizer.lr=0.01",
        "schedule=custom", "schedule.target=mine.schedule", "paths.runs=first",
    )  # fmt: skip
    assert done.code == 0, done.text
    (run,) = single_runs(tmp_path, "first")
    assert record_of(run)["steps_done"] == 5, "the callback stops it"
    done = train_forked(
        *shared, "model.target=mine.Plain", "loss=custom", "loss.target=mine.loss",
        "metrics.error.target=mine.Metric", "paths.runs=second",
    )  # fmt: skip
    assert done.code == 0, done.text
    (run,) = single_runs(tmp_path, "second")
    assert 0 < record_of(run)["metrics"]["error"] < 10


def test_evaluation_runs_the_frozen_code(train_forked, tmp_path) -> None:
    done = train_forked(*CHARS, "metrics.bits.target=chars.metrics.Bits")
    assert done.code == 0, done.text
    (folder,) = single_runs(tmp_path)
    shutil.rmtree(tmp_path / "chars")
    found = run(tmp_path, "evaluate", str(folder), "--json")
    assert found.code == 0, found.text
    measured, record = json.loads(found.out)["metrics"], record_of(folder)
    assert measured["loss"] == pytest.approx(record["loss"]["eval_final"], abs=1e-6)
    assert measured["bits/mean"] == pytest.approx(record["metrics"]["bits/mean"], abs=1e-6)
    longer = run(tmp_path, "evaluate", str(folder), "data.args.length=8", "--json")
    assert json.loads(longer.out)["metrics"]["loss"] != measured["loss"], longer.text


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_code_of_another_user_is_not_evaluated(train_forked, tmp_path) -> None:
    assert train_forked(*CHARS).code == 0
    (folder,) = single_runs(tmp_path)
    os.chown(folder / "code" / "chars.model.py", 12345, 12345)
    found = run(tmp_path, "evaluate", str(folder))
    assert found.code == 2
    assert "--trust" in found.err
