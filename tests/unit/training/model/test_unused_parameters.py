"""After one backward pass every trainable parameter has a gradient: what data parallelism needs."""

import pytest
import torch
import transformers
from unit.models.sizes.configs import TINY_CASES, make_config
from unit.training.model.plans import hand_plan
from unit.training.model.steps import make_inputs, step

from eke.models.sizes import structure
from eke.training.model.build_model import build_model
from eke.training.model.model_checks import (
    add_zero_gradients,
    freeze_unreached,
    probe_inputs,
    routed_parents,
    routed_siblings,
)

CPU = torch.device("cpu")

CASES = [
    (option, task, tied)
    for option, task in TINY_CASES
    for tied in ("true", "false")
    if tied == "true" or (task != "sequence_classification" and option != "tiny_t5")
]


@pytest.mark.parametrize(("option", "task", "tied"), CASES, ids=str)
def test_every_trainable_parameter_gets_a_gradient(option, task, tied):
    overrides = (f"model={option}", f"task={task}", f"model.tie_word_embeddings={tied}")
    model = build_model(hand_plan(*overrides), CPU)
    _, gradients = step(model)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert set(gradients) == trainable
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    planned = [w.shape for w in structure(make_config(*overrides)).weights if not w.trained]
    assert sorted(tuple(p.shape) for p in frozen.values()) == sorted(planned)
    model.requires_grad_(True)
    assert freeze_unreached(model) == tuple(frozen), "the graph says the same"


def test_unused_pooler_is_detected():
    config = transformers.BertConfig(
        vocab_size=320, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=64,
    )  # fmt: skip
    model = transformers.BertForTokenClassification(config)
    model.extra = torch.nn.Linear(2, 2)
    before = torch.get_rng_state()
    assert set(freeze_unreached(model)) == {"extra.weight", "extra.bias"}
    assert torch.equal(torch.get_rng_state(), before)
    assert model(**make_inputs(model)).logits.requires_grad


def switch(**changes):
    config = transformers.SwitchTransformersConfig(
        vocab_size=320, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_decoder_layers=2,
        num_heads=2, num_experts=8, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1,
        pad_token_id=0, eos_token_id=2, decoder_start_token_id=0, **changes,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.SwitchTransformersForConditionalGeneration(config)


def test_experts_are_never_frozen():
    """Three of eight may be reached by a probe; the others are by other tokens."""
    model = switch()
    assert freeze_unreached(model) == ()
    assert len(routed_parents(model)) == 4 - 2
    assert [len(siblings) for siblings in routed_siblings(model)] == [8, 8]


def test_experts_and_dropout_in_one_container_are_separated():
    config = transformers.NllbMoeConfig(
        vocab_size=320, d_model=32, encoder_layers=1, decoder_layers=1, num_experts=8,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=64,
        decoder_ffn_dim=64, encoder_sparse_step=1, decoder_sparse_step=1, pad_token_id=1,
        eos_token_id=2, decoder_start_token_id=2,
    )  # fmt: skip
    model = transformers.NllbMoeForConditionalGeneration(config)
    for parent in routed_parents(model):
        torch.nn.init.zeros_(parent.router.classifier.weight)
    assert freeze_unreached(model) == ()
    assert [len(siblings) for siblings in routed_siblings(model)] == [8, 8]


def test_modules_outside_a_layer_are_not_experts():
    model = switch()
    model.extra = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    assert len(freeze_unreached(model)) == 4


@pytest.mark.parametrize("eos", [5000, [2, 5000], [5000], -1, None], ids=str)
def test_probe_inputs_stay_in_the_vocabulary(eos):
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32,
    )  # fmt: skip
    config.eos_token_id = eos
    model = transformers.LlamaForCausalLM(config)
    ids = probe_inputs(model, 0)["input_ids"]
    assert int(ids.min()) >= 0
    assert int(ids.max()) < 64
    assert len(ids.unique()) > 8
    assert freeze_unreached(model) == ()


@pytest.mark.parametrize("late", [False, True], ids=str)
def test_unused_experts_get_zero_gradients_if_ranks_need_them(late):
    model = switch().eval()
    ids = torch.full((1, 4), 9)
    plain = model(input_ids=ids, decoder_input_ids=ids).logits
    for parent in routed_parents(model):
        add_zero_gradients(parent, late)
    logits = model(input_ids=ids, decoder_input_ids=ids).logits
    assert torch.equal(plain, logits)
    logits.sum().backward()
    without = [name for name, p in model.named_parameters() if p.grad is None]
    assert without == []
