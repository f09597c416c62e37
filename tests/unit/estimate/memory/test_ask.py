"""Asking for traces: what is kept, what is shared, and what a dying process leaves."""

import io
import json
import re
from dataclasses import replace

import pytest
from support import last_wins

from eke.config.compose import compose
from eke.estimate.memory import trace_client
from eke.estimate.memory.components import Method, Traced
from eke.plan.planner.plan import plan_to_plain
from eke.training.trace.trace_worker import serve
from eke.workflows.planning import plan_for

FOUND = Traced({"load": 1, "forward": 2}, {"load": 2, "forward": 4}, {"weights": 2})


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def fake_worker(tmp_path, monkeypatch):
    """A tracing process that is another program."""

    def make(code: str) -> trace_client.TraceProcess:
        (tmp_path / "stand_in.py").write_text("import sys, os, json, time\n" + code)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return trace_client.TraceProcess("stand_in")

    return make


def plan_of(*overrides):
    base = ("hardware=h100", "data=synthetic", "tracker=none")
    return plan_for(compose(list(last_wins(*base, *overrides))), planning=True)


def key_of(*overrides) -> str:
    return trace_client.trace_key(plan_of(*overrides))


@pytest.mark.parametrize(
    "override",
    ["seed=3", "optimizer.lr=1e-5", "schedule=linear", "train.steps=7", "repeat=1",
     "optimizer.beta1=0.8", "train.eval_every=3", "data.data_seed=4"],
)  # fmt: skip
def test_keys_without_memory_effect_share_a_trace(override) -> None:
    assert key_of(override) == key_of()


@pytest.mark.parametrize(
    "override",
    ["batch.per_device=3", "precision=bf16", "optimizer=sgd", "memory=checkpointing",
     "model.hidden_size=64", "data.seq_len=32", "attention=eager", "peft=lora",
     "train.max_grad_norm=null", "batch.accumulation=2", "hardware=v100_16"],
)  # fmt: skip
def test_keys_with_memory_effect_have_their_own_trace(override) -> None:
    """Another generation of GPUs chooses other kernels."""
    assert key_of(override) != key_of()


def test_mask_share_changes_the_key_only_with_sparse_prediction() -> None:
    asked = ("model=tiny_bert", "task=masked_lm", "kernels=sparse_prediction")
    assert key_of(*asked, "task.mask_frac=0.15") != key_of(*asked, "task.mask_frac=0.6")


def test_unknown_key_changes_the_trace_key(monkeypatch) -> None:
    plan, before = plan_of(), key_of()
    plain = plan_to_plain(plan)
    plain["config"]["memory"]["new_technique"] = True
    monkeypatch.setattr(trace_client, "plan_to_plain", lambda _: plain)
    assert trace_client.trace_key(plan) != before


def test_library_versions_change_the_trace_key(monkeypatch) -> None:
    before = key_of()
    monkeypatch.setattr(trace_client, "software", lambda _: {"torch": "9.9"})
    assert key_of() != before


def test_stored_trace_is_found() -> None:
    assert trace_client.find_trace("a" * 32) is None
    trace_client.keep_trace("a" * 32, FOUND)
    assert trace_client.find_trace("a" * 32) == FOUND
    assert list(trace_client.find_trace("a" * 32).allocated) == ["load", "forward"], (
        "in the order of a step"
    )


@pytest.mark.parametrize("text", ["", "{", "[]", '{"allocated": 3}', "null", "\x00"])
def test_damaged_trace_file_is_replaced(text, tmp_path) -> None:
    trace_client.keep_trace("b" * 32, FOUND)
    (path,) = (tmp_path / "cache").rglob("*.json")
    path.write_text(text)
    assert trace_client.find_trace("b" * 32) is None
    trace_client.keep_trace("b" * 32, FOUND)
    assert trace_client.find_trace("b" * 32) == FOUND


def test_unwritable_cache_is_ignored(tmp_path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    trace_client.keep_trace("c" * 32, FOUND)
    assert trace_client.find_trace("c" * 32) is None


ANSWERS = """
for line in sys.stdin:
    plan = json.loads(line)
    found = {"allocated": {"load": plan["batch"]["per_device"]}, "reserved": {"load": 9},
             "components": {}, "method": "trace", "notes": []}
    print(json.dumps({"traced": found}), flush=True)
"""


def test_one_worker_answers_many_plans(fake_worker) -> None:
    worker = fake_worker(ANSWERS)
    for size in (1, 2):
        answer = worker.ask(plan_of(f"batch.per_device={size}"))
        assert answer.traced == Traced({"load": size}, {"load": 9}, {}, Method.trace)
    worker.close()


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("sys.stdin.readline(); os.abort()", "signal 6"),
        ("sys.stdin.readline(); sys.exit(3)", "ended with code 3"),
        ("sys.stdin.readline(); print('hello', flush=True); time.sleep(60)", "is invalid"),
        ('sys.stdin.readline(); print(\'{"reason": "no"}\', flush=True)', "^no$"),
    ],
)
def test_dead_worker_gives_an_answer(fake_worker, code, reason) -> None:
    worker = fake_worker(code)
    answer = worker.ask(plan_of())
    worker.close()
    assert answer.traced is None
    assert re.search(reason, answer.reason)


def test_hung_worker_is_replaced(fake_worker) -> None:
    worker = fake_worker("time.sleep(60)")
    assert "longer than 1 s" in worker.ask(plan_of(), limit_s=0.1).reason
    fake_worker(ANSWERS)
    assert worker.ask(plan_of(), limit_s=60).traced is not None
    worker.close()


def test_trace_limit_is_cpu_time(fake_worker) -> None:
    """On a busy machine the clock runs on while a process waits for its turn."""
    worker = fake_worker("time.sleep(1.5)" + ANSWERS)
    assert worker.ask(plan_of(), limit_s=1.0).traced is not None
    worker.close()
    worker = fake_worker("while True: pass")
    assert "1 s of CPU time" in worker.ask(plan_of(), limit_s=1.0).reason
    worker.close()


def test_equal_runs_of_a_sweep_share_a_trace(fake_worker, monkeypatch) -> None:
    fake_worker(ANSWERS)
    monkeypatch.setattr(trace_client, "TraceProcess", lambda: ask_worker("stand_in"))
    ask_worker = type(trace_client._worker)
    plans = [plan_of(f"seed={n}", f"batch.per_device={size}") for size in (1, 2) for n in (0, 1)]
    told = []
    answers = trace_client.trace_all(
        plans, lambda done, total: told.append((done, total)), processes=2
    )
    assert [a.traced.allocated["load"] for a in answers] == [1, 1, 2, 2]
    assert told[0] == (0, 4)
    assert told[-1] == (4, 4)
    again = []
    trace_client.trace_all(plans, lambda done, total: again.append(done))
    assert again == [4], "nothing is traced twice"


def test_trace_worker_rejects_unreadable_plans() -> None:
    answers = io.StringIO()
    serve(["{\n", json.dumps({"run_id": 3}) + "\n"], answers)
    lines = [json.loads(line) for line in answers.getvalue().splitlines()]
    assert all("not a readable plan" in line["reason"] for line in lines)


def test_real_worker_traces(monkeypatch) -> None:
    """Without its process, which tests/unit/workflows/test_forecasting.py starts."""
    monkeypatch.setattr("eke.training.trace.trace_worker.import_libraries", lambda: None)
    plan = plan_of("model.hidden_size=64", "model.num_hidden_layers=1", "data.seq_len=16")
    answers = io.StringIO()
    serve([json.dumps(plan_to_plain(plan))], answers)
    answer = trace_client._read(answers.getvalue())
    assert answer.reason == ""
    assert answer.traced.reserved["forward"] >= answer.traced.allocated["forward"]
    assert serve.__module__ == trace_client.MODULE
    assert trace_client.trace_key(replace(plan, name="another")) == trace_client.trace_key(plan)


def test_incomplete_torch_is_reported_for_each_plan(monkeypatch) -> None:
    """Each plan gets the reason, and by formulas a forecast; the process lives on."""
    error = ImportError("cannot import name 'X' from 'torch._subclasses' (a/path)", name="torch._s")
    monkeypatch.setattr("eke.training.trace.trace_worker.import_libraries", lambda: raise_(error))
    answers = io.StringIO()
    serve([json.dumps(plan_to_plain(plan_of()))] * 2, answers)
    said = [json.loads(line)["reason"] for line in answers.getvalue().splitlines()]
    assert len(said) == 2
    assert "is not supported (cannot import name 'X' from 'torch._subclasses')" in said[0]
    own = ImportError("cannot import name 'X' from 'eke.training.trace'", name="eke.training.trace")
    monkeypatch.setattr("eke.training.trace.trace_worker.import_libraries", lambda: raise_(own))
    with pytest.raises(ImportError):
        serve([json.dumps(plan_to_plain(plan_of()))], answers)


def raise_(error: Exception):
    raise error
