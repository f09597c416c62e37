"""Forecasts of two processes against what they take: benchmarks/memory_truth_ranks.py has more."""

import json
import subprocess
import sys

import pytest
from support import REPO, environment, last_wins

from eke.common.paths import RunPaths
from eke.estimate.memory import forecast
from eke.estimate.memory.predict_memory import TRAINED
from eke.estimate.memory.trace_client import trace_all
from eke.models.sizes import shared_state_bytes
from eke.plan.planner import write_plan

BASE = (
    "data=synthetic", "data.num_samples=32", "data.num_eval_samples=2", "train.steps=2",
    "train.save_final=false", "tracker=none", "model=tiny", "model.hidden_size=192",
    "model.num_attention_heads=4", "model.num_hidden_layers=3", "model.vocab_size=1000",
    "data.seq_len=32", "batch.per_device=2", "model.dropout=0",
)  # fmt: skip

CASES = {
    "ddp": ("distributed=ddp",),
    "ddp_accumulated": ("distributed=ddp", "batch.accumulation=2"),
    "fsdp": ("distributed=fsdp",),
    "zero1": ("distributed=zero1",),
    "zero2_8bit": ("distributed=zero2", "optimizer=adamw_8bit"),
    "zero3_8bit": ("distributed=zero3", "optimizer=adamw_8bit"),
    "zero3_narrow": ("distributed=zero3", "precision=bf16_pure"),
    "zero2_offloaded": ("distributed=zero2", "offload=optimizer_cpu", "optimizer=sgd"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_peak_of_each_of_two_processes_is_forecast(case, train_ranks, make_plan) -> None:
    plan = make_plan(*BASE, *case)
    record = json.loads((train_ranks(*BASE, *case) / "record.json").read_text())
    peaks = record["memory"]["measured"]["peak_per_rank_bytes"]
    found = forecast(plan).allocated
    assert found.low <= peaks[0] <= found.high
    assert found.expected == pytest.approx(peaks[0], rel=0.08)
    held = shared_state_bytes(plan.config, plan.size, host=True)
    if plan.deepspeed is not None:
        seen = record["effective"]["deepspeed"]
        assert seen["optimizer_bytes"] == held.optimizer
        assert seen["weights_bytes"] == held.weights
        assert not [text for text in record["warnings"] if "precision.master" in text]
    if case == CASES["fsdp"]:
        seen = record["effective"]["sharding"]["state_bytes_per_rank"][0]
        assert (seen["optimizer"], seen["weights"]) == (held.optimizer, held.weights)


PHASES = {
    "llama": ("model.tie_word_embeddings=false",),
    "bert": ("model=tiny_bert", "task=masked_lm", "precision=bf16"),
}


@pytest.mark.slow
def test_each_phase_of_parts_is_foreseen(make_plan, tmp_path, monkeypatch) -> None:
    """By formulas within 5 %, by a trace within 2 %; bytes of tensors, not of the process."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    more = ("distributed=fsdp", "distributed.num_processes=2", "train.steps=3")
    typed = (*BASE, *more, "train.checkpoint_every=2")
    plans = {tmp_path / name: make_plan(*last_wins(*typed, *PHASES[name])) for name in PHASES}
    for folder, plan in plans.items():
        folder.mkdir()
        write_plan(RunPaths(folder), plan)
    program = [sys.executable, str(REPO / "tests" / "phases_in_ranks.py"), *map(str, plans)]
    done = subprocess.run(
        program, env=environment(tmp_path), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    measured = json.loads(done.stdout.rpartition("RESULT")[2])
    for (folder, plan), answer in zip(plans.items(), trace_all([*plans.values()]), strict=True):
        truth = measured[str(folder)]
        for traced, limit in ((None, 0.05), (answer.traced, 0.02)):
            found = forecast(plan, traced).phases
            found["step"] = max(found[name] for name in TRAINED)
            found["resume"] = max(found["load"], found["resume"])
            for phase, peak in truth.items():
                error = found[phase] / peak - 1
                assert abs(error) < limit, f"{folder.name}, {phase}: {error:+.1%} {traced and 1}"


@pytest.mark.slow
def test_benchmark_draws_only_valid_configurations(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(REPO / "benchmarks"))
    import memory_truth_ranks

    drawn = memory_truth_ranks.chosen(seed=1, count=10)
    assert len(drawn) == 10
    strategies = {plan.config.distributed.option for _, plan in drawn}
    assert strategies == {"ddp", "fsdp", "zero1", "zero2", "zero3"}
    assert "memory_truth_ranks" in sys.modules
