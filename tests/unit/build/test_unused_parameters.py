"""After one backward pass every trainable parameter has a gradient: what data parallelism needs."""

import pytest
import torch
import transformers
from unit.build.plans import hand_plan
from unit.build.steps import make_inputs, step
from unit.sizes.configs import TINY_CASES, make_config

from eke.build.model import build_model
from eke.build.unused import (
    freeze_unreached,
    freeze_unused,
    give_all_gradients,
    small_inputs,
)
from eke.sizes import structure

CPU = torch.device("cpu")

CASES = [
    (option, task, tied)
    for option, task in TINY_CASES
    for tied in ("true", "false")
    if not (option == "tiny_t5" and tied == "false")
]


@pytest.mark.parametrize(("option", "task", "tied"), CASES, ids=str)
def test_every_trainable_parameter_gets_a_gradient(option, task, tied):
    overrides = (f"model={option}", f"task={task}", f"model.tie_word_embeddings={tied}")
    model = build_model(hand_plan(*overrides), CPU)
    _, gradients = step(model)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert set(gradients) == trainable
    frozen = [p for p in model.parameters() if not p.requires_grad]
    planned = [w.shape for w in structure(make_config(*overrides)).weights if not w.trained]
    assert sorted(tuple(p.shape) for p in frozen) == sorted(planned)


def test_an_untied_bert_has_one():
    model = build_model(
        hand_plan("model=tiny_bert", "task=masked_lm", "model.tie_word_embeddings=false"), CPU
    )
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == [
        "cls.predictions.bias"
    ]


def test_a_shared_bias_is_not_frozen():
    model = build_model(hand_plan("model=tiny_bert", "task=masked_lm"), CPU)
    assert freeze_unused(model) == ()
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(("option", "task", "tied"), CASES, ids=str)
def test_following_the_graph_finds_the_same(option, task, tied):
    overrides = (f"model={option}", f"task={task}", f"model.tie_word_embeddings={tied}")
    model = build_model(hand_plan(*overrides), CPU)
    by_table = {name for name, p in model.named_parameters() if not p.requires_grad}
    model.requires_grad_(True)
    assert set(freeze_unreached(model, small_inputs(model)).frozen) == by_table


def test_an_unused_pooler_is_found():
    config = transformers.BertConfig(
        vocab_size=320, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=64,
    )  # fmt: skip
    model = transformers.BertForTokenClassification(config)
    model.extra = torch.nn.Linear(2, 2)
    before = torch.get_rng_state()
    found = freeze_unreached(model, small_inputs(model))
    assert set(found.frozen) == {"extra.weight", "extra.bias"}
    assert not found.routed
    assert torch.equal(torch.get_rng_state(), before)
    assert model(**make_inputs(model)).logits.requires_grad


def switch_model(**more):
    config = transformers.SwitchTransformersConfig(
        vocab_size=320, d_model=32, d_kv=16, d_ff=64, num_heads=2, num_layers=2, num_experts=8,
        num_decoder_layers=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1,
        decoder_start_token_id=0, **more,
    )  # fmt: skip
    return transformers.SwitchTransformersForConditionalGeneration(config).eval()


def test_experts_that_a_probe_does_not_reach_are_trained():
    model = switch_model()
    found = freeze_unreached(model, small_inputs(model))
    assert not found.frozen
    assert found.routed
    assert all(name.endswith("experts") for name in found.routed)


@pytest.mark.parametrize("end", [50279, -1, [1, 2], None], ids=str)
def test_an_end_of_text_outside_the_vocabulary(end):
    model = switch_model()
    model.config.eos_token_id = end
    assert all(int(each["input_ids"].max()) < 320 for each in small_inputs(model))


def test_experts_without_a_token_get_a_gradient_of_zero():
    model = switch_model()
    ids = torch.full((1, 4), 9)
    inputs = {"input_ids": ids, "decoder_input_ids": ids}
    before = model(**inputs).logits
    give_all_gradients(model, freeze_unreached(model, small_inputs(model)).routed)
    after = model(**inputs).logits
    assert torch.equal(before, after)
    after.logsumexp(-1).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    experts = [p.grad.abs().sum() for n, p in model.named_parameters() if ".experts." in n]
    assert sum(each == 0 for each in experts) >= len(experts) // 2
