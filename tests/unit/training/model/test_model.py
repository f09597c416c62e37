"""The built model: configuration, weights, seeds, dropout."""

import subprocess
import sys

import pytest
import torch
from support import environment
from unit.models.sizes.configs import FAMILY_CASES, TINY_CASES
from unit.training.model.plans import hand_plan, options_of
from unit.training.model.steps import make_inputs, same_weights

from eke.training.model.build_model import build_model
from eke.training.model.model_checks import HEADS

CPU = torch.device("cpu")
META = torch.device("meta")


def build(*overrides, device=CPU):
    return build_model(hand_plan(*overrides), device)


@pytest.mark.parametrize(("option", "task"), TINY_CASES, ids=lambda value: value)
def test_model_trains_in_float32_with_the_planned_size(option, task):
    model = build(f"model={option}", f"task={task}")
    parameters = list(model.parameters())
    assert model.training
    assert {p.dtype for p in parameters} == {torch.float32}
    planned = hand_plan(f"model={option}", f"task={task}").size.num_parameters
    assert sum(p.numel() for p in parameters) == planned
    answer = model(**make_inputs(model))
    assert answer.logits.shape == ((2, 2) if task == "sequence_classification" else (2, 16, 320))
    assert answer.get("past_key_values") is None
    config = model.config
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 1, 2)
    assert config.use_cache is False
    assert getattr(config, "decoder_start_token_id", None) in (None, 0)


def test_number_of_labels_reaches_the_model():
    model = build("model=tiny_bert", "task=sequence_classification", "task.num_labels=5")
    assert model(**make_inputs(model)).logits.shape == (2, 5)


def test_weights_do_not_depend_on_techniques():
    plain = build("model=tiny")
    for override in ("attention=eager", "precision=bf16", "compile=inductor",
                     "memory=checkpointing", "optimizer=adafactor"):  # fmt: skip
        assert same_weights(plain, build("model=tiny", override)), override


def test_building_keeps_the_random_state():
    torch.manual_seed(7)
    expected = torch.rand(4)
    torch.manual_seed(7)
    build("model=tiny_gpt2")
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize(("option", "task"), FAMILY_CASES, ids=lambda value: value)
def test_every_dropout_has_the_configured_value(option, task):
    model = build(f"model={option}", f"task={task}", "model.dropout=0.25", device=META)
    modules = {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)}
    decoder = option in ("tiny", "tiny_qwen3", "tiny_moe")
    assert modules == (set() if decoder else {0.25})
    attention = {m.attention_dropout for m in model.modules() if hasattr(m, "attention_dropout")}
    assert attention == ({0.25} if decoder else set())


def test_llama_fields_reach_the_model():
    typed = {"num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-4,
             "max_position_embeddings": 99}  # fmt: skip
    config = build(*(f"model.{key}={value}" for key, value in typed.items()), device=META).config
    assert {key: getattr(config, key) for key in typed} == typed


def test_rope_theta_reaches_the_frequencies():
    slow, fast = (build(f"model.rope_theta={theta}") for theta in (10000.0, 500000.0))
    # Frequency i is theta ** (-2 i / head_dim), head_dim 32 (Su et al. 2021, arXiv:2104.09864).
    assert slow.model.rotary_emb.inv_freq[1] == pytest.approx(10000 ** (-2 / 32))
    assert fast.model.rotary_emb.inv_freq[1] == pytest.approx(500000 ** (-2 / 32))


def test_heads_match_task_options():
    assert set(HEADS) == options_of("task") - {"custom"}


def test_import_of_build_model_loads_no_heavy_library(tmp_path):
    code = """
import sys
import eke.training.model.build_model
heavy = ("transformers", "peft", "deepspeed", "accelerate")
print(sorted(set(heavy) & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=environment(tmp_path),
    )
    assert done.stdout.strip() == "[]"
