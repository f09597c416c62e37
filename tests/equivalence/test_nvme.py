"""State in files promises the same mathematics as state in memory, and leaves nothing behind.

Widths are such that pieces reach the 1 MiB from which on DeepSpeed writes files: in two parts, the
matrices of two layers, 524,288 numbers.
"""

import json
import os

import pytest
from equivalence_cases import CASES, RAGGED
from equivalence_compare import curve, largest_difference
from unit.rules.without import switch_off

from eke.models.sizes import model_size, shared_state_bytes, state_files
from eke.plan.record import metrics
from eke.rules.deepspeed import has_libaio_header

pytestmark = [
    pytest.mark.usefixtures("alone"),
    pytest.mark.slow,
    pytest.mark.skipif(
        not has_libaio_header(""), reason="deepspeed 0.19 compiles async_io against libaio-dev"
    ),
    # torch 2.13 renames collectives that deepspeed 0.19 calls by their old names.
    pytest.mark.filterwarnings("ignore:.torch.distributed.*is deprecated:FutureWarning"),
    # deepspeed 0.19 inherits from classes that torch 2.13 and pydantic 2 deprecate.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

WIDE = (
    "model.hidden_size=128",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=2",
    "model.num_key_value_heads=2",
    "model.intermediate_size=512",
    "model.dropout=0.0",
    "tracker=none",
)
BASE = (
    *CASES["causal_lm-llama"], *RAGGED, *WIDE, "data.num_samples=29", "data.num_eval_samples=5",
    "train.steps=4", "train.log_every=4", "train.timing_warmup_steps=2",
)  # fmt: skip
CUT = ("batch.per_device=3", "batch.accumulation=4")
ALONE = ("distributed=zero3", "distributed.num_processes=1")


@pytest.fixture
def nvme(tmp_path) -> tuple[str, ...]:
    return ("offload=nvme", f"offload.path={tmp_path}/disk")


TECHNIQUES = {
    "momentum alone, weights on the host": ("optimizer=sgd", "offload.weights=host"),
    "adapters": ("peft=lora", "peft.r=64"),
    "bf16": ("precision=bf16", "train.max_grad_norm=0.1"),
    "torch's AdamW in several pieces": ("optimizer=adamw_fused", "offload.piece_numbers=262144"),
}
"""DeepSpeed's AdamW: test_nvme_run_matches_the_loop_and_resumes_exactly."""


@pytest.mark.parametrize("technique", TECHNIQUES.values(), ids=TECHNIQUES.keys())
def test_one_process_matches_the_loop(technique, nvme, baseline_of, job_of) -> None:
    kept = [one for one in technique if not one.startswith("offload.")]
    # A sum made in another order is a float32 rounding, which bfloat16 makes one of its own.
    bound = 2**-8 if "precision=bf16" in technique else 1e-5
    plain = baseline_of(*BASE, *CUT, *kept)
    job = job_of("run", *BASE, *CUT, *ALONE, *nvme, *technique)
    assert largest_difference(plain, curve(job)) < bound
    assert "nvme" in job.effective["deepspeed"]["optimizer_device"]
    assert not job.warnings
    if "offload.piece_numbers=262144" in technique:
        return  # sizes do not know in which order a model's weights are cut into pieces
    has_planned_bytes(job)


def has_planned_bytes(job) -> None:
    found, config = job.effective["deepspeed"], job.plan.config
    size = model_size(config)
    held, files = shared_state_bytes(config, size, host=True), state_files(config)
    in_files = {"optimizer": files.files, "weights": 0}
    assert found["file_bytes"] == in_files
    assert (found["optimizer_bytes"], found["weights_bytes"]) == (held.optimizer, held.weights)


def test_8_bit_states_on_disk_lose_their_scales(nvme, job_of, monkeypatch) -> None:
    """Why there is a rule. In memory they keep them: test_deepspeed."""
    switch_off("nvme_holds_plain_state", monkeypatch)
    case = (*BASE, *CUT, "optimizer=adamw_8bit", "optimizer.min_8bit_size=1")
    shared, files = (curve(job_of(n, *case, *ALONE, *m)) for n, m in (("host", ()), ("disk", nvme)))
    assert largest_difference(shared, files) > 1e-1


def test_evaluation_breaks_weights_on_disk(nvme, job_of, monkeypatch) -> None:
    """Why there is a rule. With other numbers of layers and weights it may go well."""
    switch_off("nvme_weights_stay_in_memory", monkeypatch)
    large = ("model.num_hidden_layers=1", "model.intermediate_size=2048")  # 1 MiB a matrix
    with pytest.raises(AssertionError, match="already assigned swap buffer"):
        job_of("run", *BASE, *CUT, *ALONE, *nvme, *large, "offload.weights=disk")


def test_nvme_run_matches_the_loop_and_resumes_exactly(nvme, baseline_of, job_of) -> None:
    six = (*BASE, *CUT, "train.steps=6", "train.log_every=6")
    case = (*six, *ALONE, *nvme, "train.checkpoint_every=3")
    job = job_of("run", *case)
    first = curve(job)
    assert largest_difference(baseline_of(*six), first) < 1e-5
    assert not job.warnings
    has_planned_bytes(job)
    again = job_of("run", *case)
    assert again.start_step == 3
    assert curve(again) == first


def test_two_ranks_with_nvme_match_one_and_delete_files(nvme, baseline_of, train_ranks, tmp_path):
    one = baseline_of(*BASE, *CUT)
    two = (*BASE, "distributed=zero3", "batch.per_device=2", "batch.accumulation=3", *nvme)
    folder = train_ranks(*two)
    rows, _ = metrics.read_rows(folder / "metrics.jsonl")
    found = [(r[metrics.LOSS], r["train/grad_norm"]) for r in metrics.latest(rows, metrics.LOSS)]
    assert largest_difference(one, found) < 1e-5
    record = json.loads((folder / "record.json").read_text())
    assert record["effective"]["deepspeed"]["file_bytes"]["optimizer"] > 0
    assert record["warnings"] == []
    assert os.listdir(tmp_path / "disk") == []
