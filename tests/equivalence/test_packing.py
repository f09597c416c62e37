"""Samples that share a row are computed as if each were alone; padding-free is the padded loss."""

from itertools import pairwise

import pytest
import torch
from equivalence_cases import CASES, RAGGED
from equivalence_compare import largest_difference
from support import TINY

from eke.rules import RULES, check
from eke.training.batches.dataset import build_data
from eke.training.model.attention_kernels import KernelProbe, pinned_backend, spare_mask_checks
from eke.training.model.build_model import build_model

FAMILIES = {
    "llama": "model=tiny",
    "gpt2": "model=tiny_gpt2",
    "qwen3": "model=tiny_qwen3",
    "moe": "model=tiny_moe",
}
CUTS = {
    "12x1": ("batch.per_device=12",),
    "3x4": ("batch.per_device=3", "batch.accumulation=4"),
}


@pytest.fixture(autouse=True)
def unpacked_again():
    """Other tests of this process have one sequence per row."""
    yield
    spare_mask_checks(torch.nn.Identity(), packed=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "attention", "cut"),
    [
        ("llama", "sdpa", "3x4"),
        ("llama", "eager", "12x1"),
        ("gpt2", "eager", "3x4"),
        ("qwen3", "sdpa", "12x1"),
        ("moe", "sdpa", "3x4"),
    ],
)
def test_padding_free_loss_matches_padded_loss(family, attention, cut, curve_of) -> None:
    case = (FAMILIES[family], *TINY, *RAGGED, f"attention={attention}", *CUTS[cut])
    padded, free = (curve_of(*case, f"data.packing={p}") for p in ("off", "padding_free"))
    assert largest_difference(padded, free) < 1e-5
    assert padded[0][0] != padded[-1][0], "the loss never moved"


def test_leaking_packing_is_detected(curve_of, baseline_of, monkeypatch) -> None:
    """Without the sequence numbers every token sees the samples before its own."""
    case = ("model=tiny", *TINY, *RAGGED, "batch.per_device=12")
    padded = baseline_of(*case)
    monkeypatch.setattr(
        "eke.training.model.attention_kernels.sequence_numbers", lambda positions: None
    )
    assert largest_difference(padded, curve_of(*case, "data.packing=padding_free")) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(("family", "backend"), [("llama", "flash"), ("gpt2", "math")])
def test_pinned_kernel_separates_packed_samples(family, backend, curve_of) -> None:
    case = (FAMILIES[family], *TINY, *RAGGED, f"attention.backend={backend}", "batch.per_device=12")
    padded, free = (curve_of(*case, f"data.packing={p}") for p in ("off", "padding_free"))
    assert largest_difference(padded, free) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "multiple"),
    [("causal_lm-llama", 8), ("masked_lm-bert", 5), ("seq2seq-t5", 8), ("classification-llama", 5)],
)
def test_padding_to_a_multiple_keeps_the_loss(case, multiple, curve_of, baseline_of) -> None:
    typed = (*CASES[case], *TINY, *RAGGED, "batch.per_device=6")
    padded = curve_of(*typed, f"data.pad_to_multiple_of={multiple}")
    assert largest_difference(baseline_of(*typed), padded) < 1e-5


@pytest.mark.slow
def test_grouped_samples_are_independent_of_micro_batch_size(curve_of) -> None:
    case = ("model=tiny_bert", "task=masked_lm", *TINY, *RAGGED, "data.length_grouping=true")
    whole, cut = (curve_of(*case, *CUTS[name]) for name in CUTS)
    assert largest_difference(whole, cut) < 1e-5


IMPLEMENTATIONS = {
    "eager": ("attention=eager",),
    "sdpa": ("attention=sdpa",),
    "flash": ("attention.backend=flash",),
    "math": ("attention.backend=math",),
}


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        *(("llama", attention) for attention in IMPLEMENTATIONS),
        ("gpt2", "eager"),
        ("gpt2", "sdpa"),
        ("qwen3", "flash"),
        ("moe", "eager"),
        ("moe", "math"),
    ],
)
def test_packed_row_has_the_logits_of_separate_samples(family, attention, make_plan) -> None:
    case = (FAMILIES[family], *TINY, *RAGGED, *IMPLEMENTATIONS[attention], "data.seq_len=64")
    keys = {o.split("=")[0]: o for o in case}
    plan = make_plan(*keys.values(), "data.packing=on", "batch.per_device=3")
    model = build_model(plan, torch.device("cpu")).eval()
    data = build_data(plan)
    batch = next(data.train_steps(0))[0]
    positions = batch.inputs["position_ids"]
    assert (positions == 0).sum() > len(positions), "several samples in a row"
    spare_mask_checks(model, packed=True)
    with torch.no_grad(), pinned_backend(plan):
        packed = model(**batch.inputs).logits
        spare_mask_checks(model, packed=False)
        compared = 0
        for row in range(len(positions)):
            starts = [*(positions[row] == 0).nonzero()[:, 0].tolist(), positions.shape[1]]
            for start, end in pairwise(starts):
                alone = model(input_ids=batch.inputs["input_ids"][row : row + 1, start:end]).logits
                torch.testing.assert_close(packed[row, start:end], alone[0])
                compared += end - start
    assert compared == positions.numel()


@pytest.mark.slow
# transformers 5.23 compiles masks by a flag that torch 2.13 deprecates; Dynamo and inductor of
# torch 2.13 use what torch itself deprecates.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("family", ["model=tiny", "model=tiny_moe"], ids=["llama", "moe"])
def test_flex_separates_packed_samples(family, make_plan, monkeypatch) -> None:
    """Its forward pass is all a CPU has; training with it is in tests/gpu."""
    without = tuple(rule for rule in RULES if rule.id != "flex_needs_volta")
    monkeypatch.setattr("eke.workflows.auto_batch.check", lambda facts: check(facts, without))
    case = (family, *TINY, *RAGGED, "data.packing=on", "batch.per_device=3")
    outputs = []
    for attention in ("sdpa", "flex"):
        typed = {o.split("=")[0]: o for o in (*case, "data.seq_len=64", f"attention={attention}")}
        plan = make_plan(*typed.values())
        model = build_model(plan, torch.device("cpu")).eval()
        spare_mask_checks(model, packed=True)
        batch = next(build_data(plan).train_steps(0))[0]
        with torch.no_grad(), KernelProbe() as probe:
            outputs.append(model(**batch.inputs).logits)
    assert probe.attention_kernels == {"flex"}
    torch.testing.assert_close(*outputs)
