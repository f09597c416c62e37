"""`attention=auto` is the run with the option typed; what a class lacks is refused if typed."""

import dataclasses

import pytest
import torch
import transformers
from checkpoints import save_checkpoint
from support import last_wins

from eke.common.errors import ConfigError
from eke.config.compose import compose
from eke.plan.planner import Plan
from eke.workflows.planning import plan_for

SHORT = ("data=synthetic", "data.seq_len=16", "data.max_token=300", "hardware=cpu", "tracker=none",
         "train.steps=4")  # fmt: skip
COMMON = {"vocab_size": 320, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
DECODER = {
    **COMMON, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 32,
}  # fmt: skip
WITHOUT = {
    "gemma2": ("causal_lm", {**DECODER, "num_key_value_heads": 1, "head_dim": 16}),
    "bloom": ("causal_lm", {**COMMON, "hidden_size": 32, "n_layer": 1, "n_head": 2}),
    "deberta-v2": ("masked_lm", DECODER),
}
"""Model type without sdpa -> task, and sizes of a tiny one."""


def save(folder, kind: str):
    task, sizes = WITHOUT[kind]
    head = "AutoModelForCausalLM" if task == "causal_lm" else "AutoModelForMaskedLM"
    config = transformers.AutoConfig.for_model(kind, **sizes)
    getattr(transformers, head).from_config(config).save_pretrained(folder)
    return "model=pretrained", f"model.name_or_path={folder}", f"task={task}"


def plan_of(*typed: str) -> Plan:
    return plan_for(compose(last_wins(*SHORT, *typed)), planning=True)


def assert_same(one: Plan, other: Plan) -> None:
    """The same run in every respect but what was typed."""
    assert one.run_id == other.run_id
    assert one.choices == other.choices
    assert one.config == other.config
    # The machine's free memory is another each time.
    left = [dataclasses.replace(p, overrides=(), name="", device=one.device) for p in (one, other)]
    assert left[0] == left[1]


def test_auto_attention_of_a_random_model_is_sdpa() -> None:
    auto, typed, default = (
        plan_of("model=tiny", "attention.backend=math", *choice)
        for choice in (("attention=auto",), ("attention=sdpa",), ())
    )
    assert auto.choices["attention"] == auto.config.attention.option == "sdpa"
    assert_same(auto, typed)
    assert_same(auto, default)
    assert plan_of("model=tiny", "attention=eager").run_id != auto.run_id


def test_auto_attention_of_a_checkpoint_with_sdpa_is_sdpa(tmp_path) -> None:
    model = ("model=pretrained", f"model.name_or_path={save_checkpoint(tmp_path / 'm')}")
    auto = plan_of(*model, "attention=auto")
    assert auto.choices["attention"] == "sdpa"
    assert_same(auto, plan_of(*model, "attention=sdpa"))


@pytest.mark.parametrize("kind", WITHOUT)
def test_auto_attention_of_a_checkpoint_without_sdpa_is_eager(kind, tmp_path) -> None:
    from eke.training.model.build_model import build_model

    model = save(tmp_path / "m", kind)
    auto = plan_of(*model)
    assert auto.choices["attention"] == auto.config.attention.option == "eager"
    assert_same(auto, plan_of(*model, "attention=eager"))
    with pytest.raises(ConfigError) as caught:
        plan_of(*model, "attention=sdpa")
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("attention", "sdpa")
    assert problem.id == "attention_is_implemented"
    assert str(problem.fix).startswith("attention=eager")
    built = build_model(auto, torch.device("cpu"))
    assert built.config._attn_implementation == "eager"
    assert built(input_ids=torch.full((1, 4), 9)).logits.isfinite().all()
