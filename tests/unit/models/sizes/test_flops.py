"""The FLOP formula against PyTorch's own counter, which sees every matrix multiplication."""

from dataclasses import replace

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode
from unit.models.sizes.configs import FAMILY_CASES, TINY_CASES, make_config

from eke.models.freezing import is_frozen
from eke.models.sizes import SampleMeans, model_size, structure, training_structure
from eke.models.sizes.parameters import training_flops
from eke.training.model.build_model import make_model_config
from eke.training.model.model_checks import HEADS

BATCH, SEQ, TARGET = 2, 48, 32


def counted_flops(config, target, adapt=lambda model: model):
    """FLOPs of one forward and backward pass with attention written out, per sample."""
    torch.manual_seed(0)
    model = getattr(transformers, HEADS[config.task.option]).from_config(
        make_model_config(config), attn_implementation="eager"
    )
    if config.model.family == "mixtral":
        # The counter does not know grouped matrix multiplications; one expert at a time, it does.
        model.set_experts_implementation("eager")
    model = adapt(model)
    inputs = {"input_ids": torch.randint(8, 300, (BATCH, SEQ))}
    if config.model.family == "t5":
        inputs["input_ids"][:, -1] = 2  # T5's classifier reads the position of the end token
    if config.task.option == "seq2seq_lm":
        inputs["decoder_input_ids"] = torch.randint(8, 300, (BATCH, target))
    with FlopCounterMode(display=False) as counter:
        model(**inputs, use_cache=False).logits.square().mean().backward()
    return counter.get_total_flops() / BATCH


def full_attention(parts):
    """Without the discount for causal attention: eager attention computes the masked half too."""
    return replace(parts, attention=tuple(replace(a, causal=False) for a in parts.attention))


@pytest.mark.parametrize(("option", "task"), TINY_CASES, ids=lambda value: value)
def test_flops_formula_matches_the_counter(option, task):
    overrides = (f"data.seq_len={SEQ}", "model.num_hidden_layers=2")
    config = make_config(f"model={option}", f"task={task}", *overrides)
    expected = training_flops(config, full_attention(structure(config)))[0]
    # Exact: what the formula leaves out (norms, softmax, ...) the counter does not count either.
    assert counted_flops(config, SEQ) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["model.num_decoder_layers=3"], id="deep-decoder"),
        pytest.param(["model.gated=true"], id="gated"),
    ],
)
def test_t5_counts_encoder_and_decoder_tokens_separately(overrides):
    short = (f"data.seq_len={SEQ}", f"task.target_len={TARGET}", "model.num_hidden_layers=2")
    config = make_config("model=tiny_t5", "task=seq2seq_lm", *short, *overrides)
    expected = training_flops(config, full_attention(structure(config)))[0]
    assert counted_flops(config, TARGET) == pytest.approx(expected, rel=1e-9)


def test_formula_text_evaluates_to_the_number():
    words = (" active", " decoder tokens", " tokens", " per sample", " layers", " (causal)")
    for option, task in TINY_CASES:
        size = model_size(make_config(f"model={option}", f"task={task}", "data.seq_len=48"))
        arithmetic = size.flops_formula
        for word in words:
            arithmetic = arithmetic.replace(word, "")
        assert eval(arithmetic.replace("x", "*")) == size.flops_per_sample


def test_means_are_short_in_the_formula():
    means = SampleMeans(21.0416667, 21.0416667, 512.123456, 512.123456, 512.123456)
    config = make_config("model=tiny", "data.seq_len=48")
    _, formula = training_flops(config, training_structure(config), means)
    assert " x 21.04 tokens" in formula
    assert " x 512.1 (mean of tokens x tokens) / 2 (causal)" in formula


def test_default_model_flops_match_hand_computed_values():
    size = model_size(make_config("model=tiny", "data.seq_len=256"))
    matmul = 6 * (4 * (4 * 128 * 128 + 3 * 128 * 352) + 320 * 128) * 256
    attention = 12 * 4 * 128 * 256 * 256 / 2
    assert size.flops_per_sample == matmul + attention
    assert (
        size.flops_formula
        == "6 x 843776 x 256 tokens + 12 x 4 layers x 128 x 256 x 256 / 2 (causal)"
    )


@pytest.mark.parametrize(("option", "task"), FAMILY_CASES[::2], ids=lambda value: value)
def test_flops_of_adapters_match_the_counter(option, task):
    """Frozen weights have no gradient of their own; at most the first layers' is left out, too."""
    from unit.training.model.plans import hand_plan

    from eke.training.model.adapters import apply_peft

    config = make_config(f"model={option}", f"task={task}", f"data.seq_len={SEQ}", "peft=lora")
    plan = hand_plan(f"model={option}", f"task={task}", f"data.seq_len={SEQ}", "peft=lora")
    counted = counted_flops(config, SEQ, lambda model: apply_peft(plan, model))
    parts = full_attention(training_structure(config))
    expected = training_flops(config, parts)[0]
    whole = training_flops(config, full_attention(structure(config)))[0]
    layers = config.model.num_hidden_layers
    assert expected * (1 - 1 / (3 * layers)) < counted <= expected * (1 + 1e-9) < whole


@pytest.mark.parametrize(
    ("option", "task", "freeze"),
    [
        ("tiny", "causal_lm", "embed_tokens,layers.0-1"),
        ("tiny_bert", "sequence_classification", "embeddings,encoder.layer.0-2"),
        ("tiny_gpt2", "causal_lm", "h.1-2,wpe"),
        ("tiny_t5", "seq2seq_lm", "shared,encoder"),
        ("tiny_moe", "causal_lm", "experts,lm_head"),
    ],
)
def test_frozen_layers_need_no_gradient_flops(option, task, freeze):
    """PyTorch leaves out a little more: of the first layer with anything to train."""
    overrides = (f"model={option}", f"task={task}", f"data.seq_len={SEQ}")
    config = make_config(*overrides, f"model.freeze=[{freeze}]")

    def frozen(model):
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if is_frozen(config.model.freeze, [name]):
                parameter.requires_grad_(False)
        return model

    counted = counted_flops(config, SEQ, frozen)
    parts = full_attention(training_structure(config))
    expected = training_flops(config, parts)[0]
    whole = training_flops(config, full_attention(structure(config)))[0]
    layers = config.model.num_hidden_layers
    assert expected - whole / (4 * layers) < counted <= expected * (1 + 1e-9) < whole
    assert whole - expected > 0.1 * whole
