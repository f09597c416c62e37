"""ZeRO and offload promise the same mathematics: loss and gradient norm at every step.

One process first, in this one; then two, which hold unequal numbers of targets and, in the last
step of an epoch, unequal numbers of micro-batches. Bounds: 1e-5 in float32; 1e-4 in float16, whose
loss scale is applied to the loss before other sums than GradScaler's.
"""

import json
import os

import pytest
import torch
from equivalence_cases import CASES, RAGGED, SMOOTH
from equivalence_compare import largest_difference
from support import TINY, last_wins

from eke.check import check
from eke.check.rules_deepspeed import RULES as ZERO_RULES
from eke.paths import RunPaths
from eke.record import metrics
from eke.sizes import model_size, shared_state_bytes

pytestmark = [
    # torch 2.13 renames collectives that deepspeed 0.19 calls by their old names.
    pytest.mark.filterwarnings("ignore:.torch.distributed.*is deprecated:FutureWarning"),
    # deepspeed 0.19 inherits from classes that torch 2.13 and pydantic 2 deprecate.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

UNEVEN = (*RAGGED, "data.num_samples=29", "data.num_eval_samples=5", "train.log_every=7")
SHORT = (*UNEVEN, "train.steps=6", "train.log_every=6")
CUT = ("distributed.num_processes=1", "batch.per_device=3", "batch.accumulation=4")
LLAMA = (*CASES["causal_lm-llama"], *TINY)


@pytest.fixture(autouse=True)
def alone(monkeypatch) -> None:
    """What DeepSpeed does to this process is undone after the test."""
    # ZeRO-3 puts a function of its own here (deepspeed 0.19.8), which dynamo cannot follow.
    monkeypatch.setattr(torch.nn.functional, "linear", torch.nn.functional.linear)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("LOCAL_RANK", "0")  # so that it is taken back afterwards
    monkeypatch.delenv("LOCAL_RANK")


@pytest.fixture
def job_of(make_plan, tmp_path):
    """Overrides -> the job, trained to its end in a folder of the given name."""
    from eke.run.job import build_job
    from eke.run.loop import train
    from eke.run.meter import HostClock, Meter
    from eke.run.stop import StopFlag
    from eke.track.tracker import Untracked

    def run(name: str, *overrides: str):
        plan = make_plan(*last_wins(*overrides))
        paths = RunPaths(tmp_path / name)
        paths.folder.mkdir(exist_ok=True)
        job = build_job(plan, paths, 0, StopFlag(), Untracked(), Meter(HostClock(), 0, 0), {})
        train(job)
        return job

    return run


def curve(job):
    rows, _ = metrics.read_rows(job.paths.metrics)
    latest = metrics.latest(rows, metrics.LOSS)
    return [(row[metrics.LOSS], row["train/grad_norm"]) for row in latest]


def test_zero3_alone_is_the_plain_loop_and_continues_bit_for_bit(curve_of, job_of) -> None:
    whole = curve_of(*LLAMA, *SHORT, "batch.per_device=12")
    case = (*LLAMA, *SHORT, "distributed=zero3", *CUT, "train.checkpoint_every=3")
    job = job_of("run", *case)
    first = curve(job)
    assert largest_difference(whole, first) < 1e-5
    found = job.effective["deepspeed"]
    assert (found["stage"], found["processes"]) == (3, 1)
    assert found["cut_weights"] > 0
    held = shared_state_bytes(job.plan.config, model_size(job.plan.config))
    assert found["optimizer_bytes"] == held.optimizer
    assert found["weights_bytes"] == held.weights
    again = job_of("run", *case)
    assert again.start_step == 3
    assert curve(again) == first


TECHNIQUES = {
    "zero1": ("distributed=zero1",),
    "zero2": ("distributed=zero2",),
    "sgd": ("distributed=zero2", "optimizer=sgd"),
    "checkpointing": ("distributed=zero3", "memory=checkpointing"),
    "clipped": ("distributed=zero2", "train.max_grad_norm=0.1"),
    "bf16": ("distributed=zero2", "precision=bf16"),
    "optimizer on the host": ("distributed=zero2", "offload=optimizer_cpu"),
    "torch's on the host": ("distributed=zero1", "offload=optimizer_cpu", "optimizer=adamw_fused"),
    "weights on the host": ("distributed=zero3", "offload=params_cpu"),
}
KEPT = ("optimizer=sgd", "precision=bf16", "train.max_grad_norm=0.1")
"""What the plain run has, too."""


@pytest.mark.slow
@pytest.mark.parametrize("technique", TECHNIQUES.values(), ids=TECHNIQUES.keys())
def test_one_process_is_the_plain_loop(technique, curve_of, job_of) -> None:
    kept = [o for o in technique if o in KEPT]
    cut = ("batch.per_device=3", "batch.accumulation=4")
    plain = curve_of(*LLAMA, *SHORT, *kept, *cut)
    job = job_of("run", *LLAMA, *SHORT, *technique, *CUT)
    assert largest_difference(plain, curve(job)) < 1e-5
    held = shared_state_bytes(job.plan.config, model_size(job.plan.config), host=True)
    found = job.effective["deepspeed"]
    assert (found["optimizer_bytes"], found["weights_bytes"]) == (held.optimizer, held.weights)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_float16_has_the_loss_scale_of_gradscaler(stage, curve_of, job_of) -> None:
    cut = ("precision=fp16", "batch.per_device=3", "batch.accumulation=4")
    plain = curve_of(*LLAMA, *SHORT, *cut)
    job = job_of("run", *LLAMA, *SHORT, f"distributed={stage}", *CUT, "precision=fp16")
    assert largest_difference(plain, curve(job)) < 1e-4
    assert job.effective["matmul_dtypes"] == ["float16"]


@pytest.mark.slow
def test_a_sum_that_is_not_scaled_by_ranks_would_be_seen(curve_of, job_of, monkeypatch) -> None:
    """DeepSpeed's own division by the accumulation steps, on top of eke's."""
    from eke.run.deepspeed_update import DeepSpeedUpdate

    plain = curve_of(*LLAMA, *SHORT, "batch.per_device=12")
    monkeypatch.setattr(DeepSpeedUpdate, "backward", lambda self, loss: self.engine.backward(loss))
    job = job_of("run", *LLAMA, *SHORT, "distributed=zero2", *CUT)
    assert largest_difference(plain, curve(job)) > 1e-2


@pytest.mark.slow
def test_adafactor_under_zero_is_another_algorithm(curve_of, job_of, monkeypatch) -> None:
    """Why there is a rule: flat pieces have no rows and columns."""
    adafactor = (*LLAMA, *SHORT, "optimizer=adafactor")
    plain = curve_of(*adafactor, "batch.per_device=12")
    rules = tuple(r for r in ZERO_RULES if r.id != "zero_needs_elementwise_optimizer")
    monkeypatch.setattr("eke.app.planning.check", lambda facts: check(facts, rules))
    job = job_of("run", *adafactor, "distributed=zero2", *CUT)
    assert largest_difference(plain, curve(job)) > 1e-3
    assert job.effective["optimizer_bytes_per_parameter"] == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "case"),
    [
        *((stage, "causal_lm-llama") for stage in ("zero1", "zero2", "zero3")),
        *(("zero3", case) for case in CASES if case != "causal_lm-llama"),
        ("zero2", "masked_lm-bert"),
    ],
)
def test_two_ranks_train_like_one(stage, case, curve_of, train_ranks) -> None:
    base = (*CASES[case], *TINY, *UNEVEN, *SMOOTH.get(case, ()))
    one = curve_of(*base, "batch.per_device=12")
    two = (*base, f"distributed={stage}", "batch.per_device=2", "batch.accumulation=3")
    folder = train_ranks(*two)
    rows, _ = metrics.read_rows(folder / "metrics.jsonl")
    found = [(r[metrics.LOSS], r["train/grad_norm"]) for r in metrics.latest(rows, metrics.LOSS)]
    assert largest_difference(one, found) < 1e-5
    record = json.loads((folder / "record.json").read_text())
    assert record["effective"]["deepspeed"]["processes"] == 2
    assert record["warnings"] == []


@pytest.mark.slow
def test_two_ranks_continue_bit_for_bit(train_py, train_ranks, tmp_path) -> None:
    """What ranks that torch's agent started have saved, too, continues in forked ones."""
    case = (*LLAMA, *SHORT, "distributed=zero2", "batch.per_device=6", "train.checkpoint_every=3")
    done = train_py(*last_wins(*case, "hardware=cpu"), timeout=600)
    assert done.code == 0, done.text
    (folder,) = tmp_path.glob("runs/*")
    first, _ = metrics.read_rows(folder / "metrics.jsonl")
    os.remove(folder / "record.json")
    assert train_ranks(*case) == folder
    both, _ = metrics.read_rows(folder / "metrics.jsonl")
    losses = [[r[metrics.LOSS] for r in metrics.latest(x, metrics.LOSS)] for x in (first, both)]
    assert losses[0] == losses[1]
    assert "continuing after step 3" in (folder / "train.log").read_text()
