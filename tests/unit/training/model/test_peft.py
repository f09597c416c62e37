"""Adapters of the peft library: what is trained, kept and written, for every family."""

import contextlib
import json
import re

import pytest
import torch
import transformers
from support import last_wins
from unit.models.sizes.configs import FAMILY_CASES
from unit.training.model.plans import hand_plan
from unit.training.model.steps import make_inputs, step

from eke.common.errors import ConfigError, RunError
from eke.models.sizes import state_bytes, training_structure
from eke.training.model.adapted_layers import adapted_modules
from eke.training.model.adapters import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    apply_peft,
    is_adapted,
    merge_adapters,
    quant_states,
    quant_tensors,
    warn_random_frozen_weights,
)
from eke.training.model.build_model import build_model
from eke.training.model.fused_adapters import fuse_adapters
from eke.training.model.save_model import load_weights, save_pretrained

CPU = torch.device("cpu")

SMALL = (
    "model.hidden_size=32",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=2",
    "model.intermediate_size=64",
    "model.dropout=0.0",
    "peft=lora",
)

METHODS = {
    "lora": ("peft.r=3",),
    "dora": ("peft=dora", "peft.r=3"),
    "qlora": ("peft=qlora", "peft.r=3"),
    "ia3": ("peft=ia3",),
    "experts": ("peft.r=3", "peft.experts=true"),
    "biases": ("peft.r=3", "peft.bias=lora_only"),
    "one scale": ("peft=qlora", "peft.r=3", "peft.double_quant=false", "peft.quant_type=fp4"),
    "some layers": ("peft.r=3", "peft.target_modules=[q_proj,query,c_attn,q,wi]"),
}


BY_FAMILY = ("lora", "dora", "qlora", "ia3")
"""Methods whose layers or shapes differ from family to family; the others change numbers."""

EVERYWHERE = [(method, *case) for method in BY_FAMILY for case in FAMILY_CASES]
SOMEWHERE = [
    ("biases", "tiny_bert", "masked_lm"),
    ("biases", "tiny_gpt2", "sequence_classification"),
    ("one scale", "tiny", "causal_lm"),
    ("some layers", "tiny", "causal_lm"),
    ("some layers", "tiny_t5", "seq2seq_lm"),
    ("experts", "tiny_moe", "causal_lm"),
]


def slow_unless(quick, cases):
    """Marked for `make test-all`, but for those methods."""
    return [c if c[0] in quick else pytest.param(*c, marks=pytest.mark.slow) for c in cases]


def plan_of(option, task, *more):
    overrides = {o.split("=")[0]: o for o in (f"model={option}", f"task={task}", *SMALL, *more)}
    return hand_plan(*overrides.values())


def known_targets(option, more):
    """A list of several families' names, cut to the model's own."""
    mine = {"tiny_bert": "query", "tiny_gpt2": "c_attn", "tiny_t5": "q,wi"}.get(option, "q_proj")
    typed = f"peft.target_modules=[{mine}]"
    return tuple(typed if o.startswith("peft.target_modules") else o for o in more)


def adapted(option, task, *more):
    plan = plan_of(option, task, *more)
    return plan, apply_peft(plan, build_model(plan, CPU))


def stir(model, seed=0):
    """Trained weights as after some steps: adapters that change the result."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)


@torch.no_grad()
def logits(model):
    model.eval()
    return model(**make_inputs_of(model)).logits


def make_inputs_of(model):
    return make_inputs(model.get_base_model() if is_adapted(model) else model)


@pytest.mark.parametrize(
    ("method", "option", "task"), slow_unless(("lora", "qlora"), EVERYWHERE + SOMEWHERE), ids=str
)
def test_adapter_sizes_match_real_tensors(method, option, task):
    plan, model = adapted(option, task, *known_targets(option, METHODS[method]))
    _, gradients = step(model, **make_inputs_of(model))
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    planned = [w.shape for w in training_structure(plan.config).weights if w.trained]
    assert sorted(tuple(p.shape) for p in trained.values()) == sorted(planned)
    assert sum(p.numel() for p in trained.values()) == plan.size.num_trained_parameters
    assert set(gradients) == set(trained), "every adapter, and nothing else, gets a gradient"
    held = [*model.parameters(), *quant_tensors(model)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    state = state_bytes(plan.config)
    assert sum(storages.values()) == state.weights
    assert sum(p.nbytes for p in trained.values()) == state.gradients


@pytest.mark.slow
@pytest.mark.parametrize(("method", "option", "task"), EVERYWHERE, ids=str)
def test_adapters_start_as_identity_and_merge_exactly(method, option, task):
    plan = plan_of(option, task, *METHODS[method])
    base = build_model(plan, CPU)
    before = logits(base)
    model = apply_peft(plan, base)
    torch.testing.assert_close(logits(model), before, rtol=1e-5, atol=1e-5)
    stir(model)
    after = logits(model)
    assert (after - before).abs().max() > 1e-4
    kind = type(base)
    plain = merge_adapters(plan, model)
    assert type(plain) is kind
    torch.testing.assert_close(logits(plain), after, rtol=1e-5, atol=2e-5)
    names = set(build_model(plan_of(option, task, "peft=none"), CPU).state_dict())
    assert set(plain.state_dict()) == names


# peft 0.21 asks by a name that transformers 5.23 has renamed.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("method", "option", "task"),
    slow_unless(
        ("lora",),
        [
            ("lora", "tiny", "causal_lm"),
            ("lora", "tiny_bert", "masked_lm"),
            ("lora", "tiny_gpt2", "sequence_classification"),
            ("dora", "tiny_gpt2", "causal_lm"),
            ("qlora", "tiny", "sequence_classification"),
            ("ia3", "tiny_bert", "sequence_classification"),
        ],
    ),
    ids=str,
)
def test_saved_adapter_is_loaded_by_peft(method, option, task, tmp_path):
    from peft import PeftModel

    plan, model = adapted(option, task, *METHODS[method])
    stir(model)
    save_pretrained(model, tmp_path)
    found = {p.name for p in tmp_path.iterdir()} - {"generation_config.json"}
    assert found == {ADAPTER_CONFIG, ADAPTER_WEIGHTS}
    loaded = PeftModel.from_pretrained(build_model(plan, CPU), tmp_path)
    assert torch.equal(logits(loaded), logits(model))
    assert not any(p.requires_grad for p in loaded.parameters())


def test_adapter_weights_are_restored_exactly(tmp_path):
    plan, model = adapted("tiny_bert", "sequence_classification", "peft=dora")
    stir(model)
    save_pretrained(model, tmp_path)
    assert model.peft_config["default"].inference_mode is False
    again = apply_peft(plan, build_model(plan, CPU))
    assert not torch.equal(logits(again), logits(model))
    load_weights(again, tmp_path)
    assert torch.equal(logits(again), logits(model))
    assert [p.requires_grad for p in again.parameters()] == [
        p.requires_grad for p in model.parameters()
    ]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("peft.r=3", r"weight is torch.float32 \[3, \d+\], the model's"),
        ("peft.target_modules=[q_proj]", r"lacks \d+ tensor"),
    ],
    ids=["another rank", "a missing adapter"],
)
def test_foreign_adapters_are_not_loaded(more, words, tmp_path):
    save_pretrained(adapted("tiny", "causal_lm", more)[1], tmp_path)
    with pytest.raises(RunError, match=words):
        load_weights(adapted("tiny", "causal_lm")[1], tmp_path)


def test_adapter_weights_depend_only_on_the_seed():
    before = torch.get_rng_state()
    one, same = (adapted("tiny", "causal_lm")[1] for _ in range(2))
    other = adapted("tiny", "causal_lm", "seed=1")[1]
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert torch.equal(one.get_parameter(name), same.get_parameter(name))
    assert not torch.equal(one.get_parameter(name), other.get_parameter(name))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("peft.target_modules=[q_proj,c_attn]",), "c_attn is not"),
        (("peft.target_modules=[]",), r"\[\] is not"),
        (("peft.target_modules=[lm_head]",), "lm_head is not"),
    ],
    ids=["another family's", "none", "the output projection"],
)
def test_missing_target_layers_are_rejected(more, words):
    with pytest.raises(ConfigError) as caught:
        adapted("tiny", "causal_lm", *more)
    (problem,) = caught.value.problems
    assert re.search(words, problem.value + " " + problem.why)
    assert problem.overrides == ("peft.target_modules=null",)


def test_full_module_name_selects_only_that_layer():
    _, model = adapted("tiny_bert", "masked_lm", "peft.target_modules=[output.dense]")
    names = {n for n, p in model.named_parameters() if p.requires_grad}
    assert names
    assert not any("attention" in name for name in names)


def test_cpu_evaluation_keeps_four_bit_weights():
    """bitsandbytes 0.50 repacks them in evaluation mode where the CPU multiplies in bfloat16."""
    _, model = adapted("tiny", "causal_lm", "model.hidden_size=64", "peft=qlora")
    states = quant_states(model)
    before = [(s.nested, s.absmax.clone(), s.dtype) for s in states]
    logits(model)
    for (nested, absmax, dtype), state in zip(before, states, strict=True):
        assert (nested, dtype) == (state.nested, state.dtype)
        assert torch.equal(absmax, state.absmax)


def test_four_bit_rounding_is_applied_and_recorded():
    _, model = adapted("tiny", "causal_lm", "peft=qlora", "peft.quant_type=fp4")
    exact = logits(build_model(plan_of("tiny", "causal_lm", "peft=none"), CPU))
    assert 1e-4 < (logits(model) - exact).abs().max() < 1
    assert {state.quant_type for state in quant_states(model)} == {"fp4"}
    assert len(quant_states(model)) == 2 * 7


def test_untrained_random_weights_are_reported():
    _, model = adapted("tiny_bert", "masked_lm")
    (words,) = warn_random_frozen_weights(model, ("cls.predictions.transform.dense.weight",))
    assert "1 tensor left random" in words
    _, classifier = adapted("tiny_bert", "sequence_classification")
    assert (
        warn_random_frozen_weights(classifier, ("classifier.weight", "bert.pooler.dense.bias"))
        == []
    )
    plain = build_model(plan_of("tiny", "causal_lm", "model.freeze=[norm]"), CPU)
    (words,) = warn_random_frozen_weights(plain, ("model.norm.weight", "lm_head.weight"))
    assert words.endswith(": model.norm.weight")


def test_saved_adapter_configuration_names_its_base(tmp_path):
    _, model = adapted("tiny", "causal_lm", "model.num_hidden_layers=8")
    save_pretrained(model, tmp_path)
    content = json.loads((tmp_path / ADAPTER_CONFIG).read_text())
    assert 1 < len(content["target_modules"]) <= 7
    assert content["target_modules"] == sorted(content["target_modules"]), "the same in every run"
    scales = adapted("tiny_t5", "seq2seq_lm", "peft=ia3")[1]
    save_pretrained(scales, tmp_path / "ia3")
    scaled = json.loads((tmp_path / "ia3" / ADAPTER_CONFIG).read_text())["feedforward_modules"]
    assert len(scaled) > 1
    assert scaled == sorted(scaled)
    assert content["inference_mode"]
    assert not model.peft_config["default"].inference_mode, "the model trains on"
    assert (content["r"], content["task_type"]) == (16, "CAUSAL_LM")


TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 320}
SIZES = {**TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 48}  # fmt: skip
MIXTURE = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
           "n_shared_experts": 1, "num_experts_per_tok": 2,
           "moe_intermediate_size": 16}  # fmt: skip
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4,
          "qk_nope_head_dim": 8, "v_head_dim": 8}  # fmt: skip
MAMBA = {**TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
OTHERS = {
    "deepseek_v3": ({**SIZES, **MIXTURE, **LATENT}, set()),
    "glm4_moe": ({**SIZES, **MIXTURE, "head_dim": 8}, set()),
    "mamba": (MAMBA, {"mixer.dt_proj", "mixer.out_proj", "mixer.x_proj"}),
    "mamba2": ({**MAMBA, "num_heads": 4, "head_dim": 16, "n_groups": 1}, {"mixer.out_proj"}),
    "jamba": (
        {**SIZES, "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
         "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 8,
         "mamba_dt_rank": 4, "use_mamba_kernels": False},
        {"mamba.dt_proj"},
    ),
    "llama4_text": (
        {**SIZES, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 1,
         "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2},
        {"feed_forward.router"},
    ),
    "bloom": ({**TOKENS, "hidden_size": 32, "n_layer": 2, "n_head": 4}, set()),
    "falcon": ({**TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
               set()),
}  # fmt: skip
"""Model type -> sizes, and the linear layers that can have no adapter."""


def other(kind):
    config = transformers.AutoConfig.for_model(kind, **OTHERS[kind][0])
    config.use_cache = False
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


def lora_of(kind, *more):
    return apply_peft(
        hand_plan(*last_wins("model=tiny", "peft=lora", "peft.r=2", *more)), other(kind)
    )


# peft 0.21 asks by a name that transformers 5.23 has renamed.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("kind", OTHERS)
def test_every_target_layer_has_an_adapter(kind, fused, tmp_path):
    from peft import PeftModel

    plan = hand_plan("model=tiny", "peft=lora", "peft.r=2", f"peft.fused={str(fused).lower()}")
    model = apply_peft(plan, other(kind))
    fuse_adapters(plan, model)
    left_out = OTHERS[kind][1]
    linear = {n for n, m in other(kind).named_modules() if isinstance(m, torch.nn.Linear)}
    assert adapted_modules(model) == {
        n for n in linear - {"lm_head"} if not n.endswith(("none", *left_out))
    }
    told = [said.split(": ")[0] for said in model.without_adapters if "experts" not in said]
    assert set(told) == {f"no adapter on {name}" for name in left_out}
    _, gradients = step(model, **make_inputs_of(model))
    assert set(gradients) == {n for n, p in model.named_parameters() if p.requires_grad}
    stir(model)
    save_pretrained(model, tmp_path)
    loaded = PeftModel.from_pretrained(other(kind), tmp_path)
    torch.testing.assert_close(logits(loaded), after := logits(model), rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(logits(merge_adapters(plan, model)), after, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("kind", ["deepseek_v3", "llama4_text"])
def test_routed_experts_have_adapters_on_request(kind):
    plan = hand_plan("model=tiny", "peft=lora", "peft.r=2", "peft.experts=true")
    model = lora_of(kind, "peft.experts=true")
    assert adapted_modules(model) - adapted_modules(lora_of(kind)) == {
        "model.layers.1.mlp.experts" if kind == "deepseek_v3" else
        "model.layers.1.feed_forward.experts"
    }  # fmt: skip
    assert not any("experts" in said for said in model.without_adapters)
    assert any("peft.experts=true" in said for said in lora_of(kind).without_adapters)
    stir(model)
    after = logits(model)
    torch.testing.assert_close(logits(merge_adapters(plan, model)), after, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("kind", "more", "fix"),
    [
        ("mamba", "peft.target_modules=[in_proj,out_proj]", "peft.target_modules=null"),
        ("llama4_text", "peft.target_modules=[router]", "peft.target_modules=null"),
        ("bloom", "peft.experts=true", "peft.experts=false"),
        ("deepseek_v3", "peft.experts=true peft.dropout=0.1", "peft.dropout=0"),
    ],
    ids=["kernels read it", "a router", "no experts", "dropout"],
)
def test_invalid_adapter_is_rejected(kind, more, fix):
    with pytest.raises(ConfigError) as caught:
        lora_of(kind, *more.split())
    assert caught.value.problems[0].overrides == (fix,)


# peft 0.21 gives patterns to experts, which are no modules.
@pytest.mark.filterwarnings("ignore:.*_pattern keys did not match:RuntimeWarning")
def test_adapted_layers_are_checked_against_the_request(monkeypatch):
    monkeypatch.setattr("eke.training.model.adapters.as_named", contextlib.nullcontext)
    with pytest.raises(ConfigError, match="DeepseekV3ForCausalLM"):
        lora_of("deepseek_v3")


def test_adapter_unsupported_by_peft_is_named():
    (said,) = [w for w in lora_of("deepseek_v3", "peft=dora").without_adapters if "load" in w]
    assert "eke export --merge" in said
    assert not any("load" in w for w in lora_of("deepseek_v3").without_adapters)


def test_adapters_of_a_shared_weight_are_not_merged():
    model = other("mamba")
    first, second = (layer.mixer for layer in model.backbone.layers)
    second.in_proj.weight = first.in_proj.weight
    plan = hand_plan("model=tiny", "peft=lora", "peft.r=2")
    with pytest.raises(RunError, match="shares its weight"):
        merge_adapters(plan, apply_peft(plan, model))
