"""ZeRO and offload promise the same mathematics: loss and gradient norm at every step.

One process first, in this one; then two, which hold unequal numbers of targets and, in the last
step of an epoch, unequal numbers of micro-batches. Bounds: 1e-5 in float32; 1e-4 in float16, whose
loss scale is applied to the loss before other sums than GradScaler's.
"""

import json
import os
from pathlib import Path

import pytest
import torch
from equivalence_cases import CASES, RAGGED, SMOOTH
from equivalence_compare import curve, largest_difference
from safetensors.torch import load_file
from support import TINY, last_wins
from trained import train_job
from unit.rules.without import switch_off

from eke.models.sizes import model_size, shared_state_bytes
from eke.plan.record import metrics

pytestmark = [
    pytest.mark.usefixtures("alone"),
    # torch 2.13 renames collectives that deepspeed 0.19 calls by their old names.
    pytest.mark.filterwarnings("ignore:.torch.distributed.*is deprecated:FutureWarning"),
    # deepspeed 0.19 inherits from classes that torch 2.13 and pydantic 2 deprecate.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

UNEVEN = (*RAGGED, "data.num_samples=29", "data.num_eval_samples=5", "train.log_every=7")
SHORT = (*UNEVEN, "train.steps=4", "train.log_every=6")
CUT = ("distributed.num_processes=1", "batch.per_device=3", "batch.accumulation=4")
LLAMA = (*CASES["causal_lm-llama"], *TINY)
WHOLE_TENSORS = "zero_needs_elementwise_optimizer"


def has_planned_bytes(job) -> None:
    held = shared_state_bytes(job.plan.config, model_size(job.plan.config), host=True)
    found = job.effective["deepspeed"]
    assert (found["optimizer_bytes"], found["weights_bytes"]) == (held.optimizer, held.weights)


def test_zero3_on_one_process_matches_loop_and_resumes_exactly(baseline_of, job_of) -> None:
    whole = baseline_of(*LLAMA, *SHORT, "batch.per_device=12")
    case = (*LLAMA, *SHORT, "distributed=zero3", *CUT, "train.checkpoint_every=2")
    job = job_of("run", *case)
    first = curve(job)
    assert largest_difference(whole, first) < 1e-5
    found = job.effective["deepspeed"]
    assert (found["stage"], found["processes"]) == (3, 1)
    assert found["cut_weights"] > 0
    has_planned_bytes(job)
    again = job_of("run", *case)
    assert again.start_step == 2
    assert curve(again) == first


def evaluated(job):
    """The last evaluation."""
    rows, _ = metrics.read_rows(job.paths.metrics)
    return [row[metrics.EVAL_LOSS] for row in rows if metrics.EVAL_LOSS in row][-1]


TECHNIQUES = {
    "sgd, clipped": ("distributed=zero2", "optimizer=sgd", "optimizer.weight_decay=0.5",
                     "train.max_grad_norm=0.1"),
    "lion, checkpointing": ("distributed=zero3", "optimizer=lion", "memory=checkpointing"),
    "bf16": ("distributed=zero2", "precision=bf16"),
    "fp8": ("distributed=zero2", "precision=fp8"),
    "lora": ("distributed=zero2", "peft=lora"),
    "dora, selective": ("distributed=zero3", "peft=dora", "memory=checkpointing_selective"),
    "ia3": ("distributed=zero1", "peft=ia3"),
    "optimizer on the host": ("distributed=zero2", "offload=optimizer_cpu"),
    "torch's on the host": ("distributed=zero1", "offload=optimizer_cpu", "optimizer=adamw_fused"),
    "weights on the host": ("distributed=zero3", "offload=params_cpu"),
}  # fmt: skip
KEPT = ("optimizer=", "optimizer.", "precision=", "train.max_grad_norm=", "peft=")
"""What the plain run has, too."""


@pytest.mark.slow
@pytest.mark.parametrize("technique", TECHNIQUES.values(), ids=TECHNIQUES.keys())
def test_one_process_matches_the_loop(technique, baseline_of, job_of) -> None:
    kept = [o for o in technique if o.startswith(KEPT)]
    cut = ("batch.per_device=3", "batch.accumulation=4")
    plain = baseline_of(*LLAMA, *SHORT, *kept, *cut)
    job = job_of("run", *LLAMA, *SHORT, *technique, *CUT)
    assert largest_difference(plain, curve(job)) < 1e-5
    has_planned_bytes(job)
    assert job.warnings == []


@pytest.mark.slow
def test_repeated_matrix_products_are_counted(job_of) -> None:
    """T5's attention is not fused: its products stand in ZeRO-3's own autograd function."""
    case = (*CASES["seq2seq-t5"], *TINY, *SHORT, *CUT, "distributed=zero3", "train.steps=1")
    jobs = [job_of(m, *case, f"memory={m}") for m in ("checkpointing", "checkpointing_selective")]
    full, selective = (job.effective["matmuls_recomputed_per_micro_batch"] for job in jobs)
    assert selective == 0 < full
    assert not [w for job in jobs for w in job.warnings if "checkpointing" in w]


@pytest.mark.parametrize("stage", [pytest.param("zero2", marks=pytest.mark.slow), "zero3"])
def test_bfloat16_weights_use_float32_master_copies(stage, baseline_of, job_of) -> None:
    """Gradients are rounded to bfloat16 once more than without DeepSpeed: bound as in 16 bits.

    Continued, they are the same to the bit: the copies are in the checkpoint.
    """
    narrow = (*LLAMA, *SHORT, "precision=bf16_pure", "train.steps=6", "train.checkpoint_every=3")
    plain = baseline_of(
        *narrow, "precision.master=on", "batch.per_device=3", "batch.accumulation=4"
    )
    case = (*narrow, f"distributed={stage}", *CUT)
    job = job_of("run", *case)
    assert largest_difference(plain, curve(job)) < 2**-8
    assert job.plan.compute.master
    has_planned_bytes(job)
    first = curve(job)
    again = job_of("run", *case)
    assert again.start_step == 3
    assert curve(again) == first


@pytest.mark.slow
def test_evaluation_uses_its_configured_format(job_of) -> None:
    job = job_of("run", *LLAMA, *SHORT, "distributed=zero2", *CUT, "precision.evaluation=bfloat16")
    assert job.effective["matmul_dtypes"] == ["float32"]
    assert job.effective["eval_matmul_dtypes"] == ["bfloat16"]


@pytest.mark.slow
def test_8_bit_states_use_other_blocks(curve_of, job_of) -> None:
    """Blocks of 256 numbers begin elsewhere in flat pieces: rounded to 8 bits, but not alike."""
    case = (*LLAMA, *SHORT, "optimizer=adamw_8bit", "optimizer.min_8bit_size=1")
    plain = curve_of(*case, "batch.per_device=3", "batch.accumulation=4")
    case = (*case, "distributed=zero2", *CUT, "train.checkpoint_every=2")
    job = job_of("run", *case)
    assert 1e-7 < largest_difference(plain, curve(job)) < 1e-3
    assert job.effective["optimizer_quantised_frac"] > 0.3, "all but embeddings"
    first = curve(job)
    assert curve(job_of("run", *case)) == first, "it continues to the bit"


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_float16_loss_scale_matches_gradscaler(stage, baseline_of, job_of) -> None:
    cut = ("precision=fp16", "batch.per_device=3", "batch.accumulation=4")
    plain = baseline_of(*LLAMA, *SHORT, *cut)
    job = job_of("run", *LLAMA, *SHORT, f"distributed={stage}", *CUT, "precision=fp16")
    assert largest_difference(plain, curve(job)) < 1e-4
    assert job.effective["matmul_dtypes"] == ["float16"]


@pytest.mark.slow
def test_unscaled_gradient_sum_is_detected(baseline_of, job_of, monkeypatch) -> None:
    """DeepSpeed's own division by the accumulation steps, on top of eke's."""
    from eke.training.distributed.deepspeed_engine import DeepSpeedUpdate

    plain = baseline_of(*LLAMA, *SHORT, "batch.per_device=12")
    monkeypatch.setattr(
        DeepSpeedUpdate, "backward", lambda self, loss, num: self.engine.backward(loss / num)
    )
    job = job_of("run", *LLAMA, *SHORT, "distributed=zero2", *CUT)
    assert largest_difference(plain, curve(job)) > 1e-2


@pytest.mark.slow
def test_adafactor_differs_under_zero(curve_of, job_of, monkeypatch) -> None:
    """Why there is a rule: flat pieces have no rows and columns."""
    adafactor = (*LLAMA, *SHORT, "optimizer=adafactor", "train.steps=6")
    plain = curve_of(*adafactor, "batch.per_device=12")
    switch_off(WHOLE_TENSORS, monkeypatch)
    job = job_of("run", *adafactor, "distributed=zero2", *CUT)
    assert largest_difference(plain, curve(job)) > 1e-3
    assert job.effective["optimizer_bytes_per_parameter"] == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "words"),
    [("muon", "Param gradient must be a 2D matrix"), ("galore", "index out of range")],
)
def test_matrix_optimizers_fail_on_shards(optimizer, words, job_of, monkeypatch) -> None:
    switch_off(WHOLE_TENSORS, monkeypatch)
    with pytest.raises((ValueError, IndexError), match=words):
        job_of("run", *LLAMA, *SHORT, f"optimizer={optimizer}", "distributed=zero2", *CUT)


@pytest.mark.slow
def test_16_bit_adapters_stay_16_bit_under_zero(job_of, monkeypatch) -> None:
    narrow = (*LLAMA, *SHORT, "precision=bf16_pure", "peft=lora")
    switch_off("zero_rounds_adapters", monkeypatch)
    jobs = (job_of("plain", *narrow), job_of("run", *narrow, "distributed=zero2", *CUT))
    plain, shared = (
        {p.dtype for p in job.bare_model.parameters() if p.requires_grad} for job in jobs
    )
    assert (plain, shared) == ({torch.float32}, {torch.bfloat16})


@pytest.mark.slow
def test_zero_keeps_master_copies_despite_master_off(job_of, monkeypatch) -> None:
    switch_off("zero_keeps_masters", monkeypatch)
    asked = ("precision=bf16_pure", "precision.master=off")
    job = job_of("run", *LLAMA, *SHORT, "distributed=zero2", *CUT, *asked)
    found = job.effective["deepspeed"]
    assert found["optimizer_bytes"] == 3 * 4 * found["piece_numbers"], "two moments and the copy"


@pytest.mark.slow
def test_averaged_weights_of_shards_are_not_evaluated(curve_of, job_of, monkeypatch) -> None:
    case = (*LLAMA, *SHORT, "optimizer=schedule_free", "train.steps=6", *CUT)
    switch_off(WHOLE_TENSORS, monkeypatch)
    plain, shared = (evaluated(job_of(d, *case, f"distributed={d}")) for d in ("none", "zero2"))
    assert abs(plain - shared) / plain > 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "case"),
    [
        ("zero1", "causal_lm-llama"),
        ("zero2", "masked_lm-bert"),
        ("zero3", "causal_lm-llama"),
        ("zero3", "classification-bert"),
        ("zero3", "seq2seq-t5"),
    ],
)
def test_two_ranks_match_one(stage, case, baseline_of, train_ranks) -> None:
    base = (*CASES[case], *TINY, *UNEVEN, *SMOOTH.get(case, ()))
    one = baseline_of(*base, "batch.per_device=12")
    two = (*base, f"distributed={stage}", "batch.per_device=2", "batch.accumulation=3")
    folder = train_ranks(*two)
    rows, _ = metrics.read_rows(folder / "metrics.jsonl")
    found = [(r[metrics.LOSS], r["train/grad_norm"]) for r in metrics.latest(rows, metrics.LOSS)]
    assert largest_difference(one, found) < 1e-5
    record = json.loads((folder / "record.json").read_text())
    assert record["effective"]["deepspeed"]["processes"] == 2
    assert record["warnings"] == []


@pytest.mark.slow
def test_two_ranks_resume_bit_exact(train_py, train_ranks, tmp_path) -> None:
    """What ranks that torch's agent started have saved, too, continues in forked ones."""
    case = (*LLAMA, *SHORT, "distributed=zero2", "batch.per_device=6", "train.checkpoint_every=2")
    done = train_py(*last_wins(*case, "hardware=cpu"), timeout=600)
    assert done.code == 0, done.text
    (folder,) = tmp_path.glob("runs/*")
    first, _ = metrics.read_rows(folder / "metrics.jsonl")
    os.remove(folder / "record.json")
    assert train_ranks(*case) == folder
    both, _ = metrics.read_rows(folder / "metrics.jsonl")
    losses = [[r[metrics.LOSS] for r in metrics.latest(x, metrics.LOSS)] for x in (first, both)]
    assert losses[0] == losses[1]
    assert "resuming after step 2" in (folder / "train.log").read_text()


@pytest.mark.slow
def test_adapters_of_two_ranks_are_saved_as_full_tensors(make_plan, train_ranks, tmp_path) -> None:
    """Weights that are cut: the adapters' file is that of one process."""
    base = (*LLAMA, *SHORT, "peft=lora", "train.save_final=true")
    one = train_job(make_plan(*last_wins(*base, "batch.per_device=12")), tmp_path / "one")
    two = (*base, "distributed=zero3", "batch.per_device=2", "batch.accumulation=3")
    foreseen = make_plan(*last_wins(*two)).warnings
    folder = train_ranks(*two)
    assert json.loads((folder / "record.json").read_text())["warnings"] == list(foreseen)
    same_tensors(one.paths.folder, folder)


def same_tensors(first: Path, second: Path) -> None:
    """Adapters of two runs; within what Adam makes of another order of sums."""
    mine, theirs = (load_file(f / "model/adapter_model.safetensors") for f in (first, second))
    assert mine.keys() == theirs.keys()
    for key, tensor in mine.items():
        torch.testing.assert_close(theirs[key], tensor, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("distributed", "compiled"), [("none", True), ("zero1", False)], ids=["plain", "zero1"]
)
def test_zero_ignores_compile(distributed, compiled, train_ranks, monkeypatch) -> None:
    """In a process of its own: graphs are counted for a whole process."""
    switch_off("zero_with_compile", monkeypatch)
    more = (f"distributed={distributed}", "compile=eager", *CUT[1:], "train.steps=1")
    folder = train_ranks(*LLAMA, *SHORT, *more)
    effective = json.loads((folder / "record.json").read_text())["effective"]
    assert (effective["compile"]["graphs"] > 0) is compiled
