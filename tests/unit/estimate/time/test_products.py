"""FLOPs that are executed, against those of the mathematics (eke.models.sizes.parameters)."""

import pytest
from unit.estimate.time.cases import small

from eke.estimate.time.flops import Work
from eke.models.sizes import training_structure
from eke.models.sizes.parameters import attention_flops, tokens_per_sample

FAMILIES = {
    "tiny": (),
    "tiny_qwen3": (),
    "tiny_moe": (),
    "tiny_gpt2": (),
    "tiny_bert": ("task=masked_lm",),
    "tiny_t5": ("task=seq2seq_lm",),
}


def of_kind(plan, *kinds: str) -> float:
    return sum(each.flops for each in Work(plan).products if not kinds or each.kind in kinds)


@pytest.mark.parametrize("model", FAMILIES)
def test_weights_cost_six_flops_per_token(model) -> None:
    plan = small(f"model={model}", *FAMILIES[model], "attention=eager")
    structure, tokens = training_structure(plan.config), tokens_per_sample(plan.config)
    needed = 6 * sum(w.num_active * tokens[w.tokens] for w in structure.weights)
    assert of_kind(plan, "linear", "head") == pytest.approx(needed * plan.batch.samples_per_step)


@pytest.mark.parametrize("model", FAMILIES)
def test_unfused_attention_computes_all_scores(model) -> None:
    plan = small(f"model={model}", *FAMILIES[model], "attention=eager", "model.dropout=0")
    tokens, samples = tokens_per_sample(plan.config), plan.batch.samples_per_step
    parts = training_structure(plan.config).attention
    needed = sum(attention_flops(each, tokens) for each in parts) * samples
    whole = sum(attention_flops(e, tokens) * (2 if e.causal else 1) for e in parts) * samples
    assert of_kind(plan, "attention") == pytest.approx(whole)
    fused = small(f"model={model}", *FAMILIES[model], "attention=sdpa", "model.dropout=0")
    # Two products forward, five backward in place of four: the scores once more.
    assert of_kind(fused, "attention") == pytest.approx(needed * 7 / 6)


def test_frozen_weight_has_no_gradient_flops() -> None:
    whole, adapted = small(), small("peft=lora")
    assert 0.6 < of_kind(adapted, "linear") / of_kind(whole, "linear") < 0.8


@pytest.mark.parametrize(("every_n", "share"), [(1, 1.0), (2, 0.5)])
def test_checkpointing_repeats_the_forward_pass(every_n, share) -> None:
    plain = small("attention=eager")
    again = small("attention=eager", "memory=checkpointing", f"memory.every_n={every_n}")
    layers = of_kind(plain, "linear", "attention")
    assert of_kind(again) == pytest.approx(of_kind(plain) + share * layers / 3)


def test_selective_checkpointing_repeats_no_product() -> None:
    plain, selective = small(), small("memory=checkpointing_selective")
    assert of_kind(selective) == of_kind(plain)
    assert Work(selective).moved.expected > Work(plain).moved.expected


def test_muon_iterations_have_equal_work() -> None:
    five, twenty = (Work(small("optimizer=muon", f"optimizer.ns_steps={n}")) for n in (5, 20))
    assert twenty.updates.flops == pytest.approx(4 * five.updates.flops)
    assert five.updates.flops > 0


def test_accumulation_does_not_change_the_work() -> None:
    at_once, cut = small("batch.per_device=8"), small("batch.per_device=2", "batch.accumulation=4")
    assert of_kind(cut) == pytest.approx(of_kind(at_once))
    whole, pieces = Work(at_once), Work(cut)
    assert pieces.launches.expected == pytest.approx(4 * whole.launches.expected)
    assert pieces.updates.moved.expected > whole.updates.moved.expected
