"""A checkpoint becomes the model of the task: its weights, a seeded head, one number format."""

import dataclasses
import json
import shutil

import pytest
import torch
import torch.nn.functional as F
import transformers
from checkpoints import (
    FAMILIES,
    TASK_OF,
    checkpoint_plan,
    make_model_config,
    save_checkpoint,
)
from torch.overrides import TorchFunctionMode
from unit.training.model.steps import make_inputs, same_weights, step

from eke.common.errors import ChangedError, RunError
from eke.data.sources import Vocabulary
from eke.plan.planner import check_inputs
from eke.training.model.build_model import build_model, build_model_and_report
from eke.training.model.model_checks import HEADS

CPU, META = torch.device("cpu"), torch.device("meta")


def load(path, *overrides, device=CPU):
    return build_model_and_report(checkpoint_plan(path, *overrides), device)


def own_task(family):
    return TASK_OF.get(family, "causal_lm")


@pytest.mark.parametrize("family", FAMILIES)
def test_loaded_weights_match_the_checkpoint(saved, family):
    model, report = load(saved[family], f"task={own_task(family)}")
    plain = getattr(transformers, HEADS[own_task(family)]).from_pretrained(saved[family])
    assert same_weights(model, plain)
    assert model.training
    assert report.warnings == []
    assert model.config.use_cache is False
    assert (
        sum(p.numel() for p in model.parameters())
        == checkpoint_plan(saved[family], f"task={own_task(family)}").size.num_parameters
    )


HEAD = {
    "bert": {"bert.pooler.dense.bias", "bert.pooler.dense.weight", "classifier.bias",
             "classifier.weight"},
    "t5": {"classification_head.dense.bias", "classification_head.dense.weight",
           "classification_head.out_proj.bias", "classification_head.out_proj.weight"},
}  # fmt: skip
CLASSIFY = "task=sequence_classification"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "bert", "gpt2", "t5"])
def test_new_head_is_named_and_seeded(saved, family):
    three = (CLASSIFY, "task.num_labels=3")
    model, report = load(saved[family], *three)
    assert set(report.new_weights) == HEAD.get(family, {"score.weight"})
    assert "initialized at random" in report.warnings[0]
    techniques = ("attention=eager", "precision=bf16", "compile=aot_eager")
    assert same_weights(model, load(saved[family], *three, *techniques)[0])
    other = load(saved[family], *three, "seed=1")[0]
    name = next(n for n in report.new_weights if n.endswith("weight"))
    assert not torch.equal(model.get_parameter(name), other.get_parameter(name))
    loss, gradients = step(model)
    assert torch.isfinite(loss)
    assert len(gradients) == sum(p.requires_grad for p in model.parameters())


def test_saved_configuration_names_the_problem_type(tmp_path):
    several = {"num_labels": 3, "problem_type": "multi_label_classification"}
    path = save_checkpoint(tmp_path / "c", "bert", task="sequence_classification", **several)
    for problem, name, count in (
        ("single", "single_label_classification", 3),
        ("multi_label", "multi_label_classification", 3),
        ("regression", "regression", 1),
    ):
        model, report = load(path, CLASSIFY, "task.num_labels=3" * (count == 3) or "seed=0",
                             f"task.problem={problem}")  # fmt: skip
        assert (model.config.problem_type, model.config.num_labels) == (name, count)
        assert bool(report.resized_weights) == (count == 1)


def test_classifier_keeps_its_head_for_equal_classes(tmp_path):
    path = save_checkpoint(tmp_path / "c", "llama", task="sequence_classification", num_labels=3)
    model, report = load(path, CLASSIFY, "task.num_labels=3")
    assert report.warnings == []
    assert model.num_labels == 3
    model, report = load(path, CLASSIFY, "task.num_labels=5")
    assert report.resized_weights == ("score.weight",)
    assert model(**make_inputs(model)).logits.shape == (2, 5)


def test_pure_bfloat16_rounds_weights_and_keeps_the_new_head(saved):
    """transformers would keep some of T5's in float32."""
    wide, _ = load(saved["t5"], CLASSIFY)
    narrow, report = load(saved["t5"], CLASSIFY, "precision=bf16_pure")
    assert report.new_weights
    for name, weight in wide.named_parameters():
        assert narrow.get_parameter(name).dtype == torch.bfloat16
        assert torch.equal(weight.bfloat16(), narrow.get_parameter(name)), name


def test_16_bit_weights_are_loaded_as_float32(saved, tmp_path):
    path, narrow = tmp_path / "narrow", torch.bfloat16
    transformers.LlamaForCausalLM.from_pretrained(saved["llama"], dtype=narrow).save_pretrained(
        path
    )
    assert json.loads((path / "config.json").read_text())["dtype"] == "bfloat16"
    model, _ = load(path)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_attention_has_the_configured_implementation(saved):
    assert load(saved["gpt2"], "attention=eager")[0].config._attn_implementation == "eager"
    assert load(saved["gpt2"])[0].config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("family", "name"), [("llama", "attention_dropout"), ("t5", "dropout_rate")], ids=str
)
def test_dropout_defaults_to_the_checkpoint(tmp_path, family, name):
    """Below every dropout of many kinds of models is set."""
    path = save_checkpoint(tmp_path / "m", family, **{name: 0.125})
    task = f"task={own_task(family)}"
    assert getattr(load(path, task)[0].config, name) == 0.125
    model, _ = load(path, task, "model.dropout=0.25")
    found = {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)}
    found |= {m.attention_dropout for m in model.modules() if hasattr(m, "attention_dropout")}
    assert found == {0.25}


def test_classifier_padding_id_comes_from_the_data(tmp_path):
    path = save_checkpoint(tmp_path / "m", "llama", pad_token_id=None, eos_token_id=[7, 9])
    config = load(path, CLASSIFY)[0].config
    assert (config.pad_token_id, config.eos_token_id) == (0, 2)  # eke's bytes and synthetic rows
    other = Vocabulary(tokenizer="another", pad=7, eos=9)
    made = build_model(
        dataclasses.replace(checkpoint_plan(path, CLASSIFY), vocabulary=other), CPU
    ).config
    assert (made.pad_token_id, made.eos_token_id) == (7, 9)


def test_meta_device_loads_no_weights(saved):
    plan = checkpoint_plan(saved["t5"], "task=seq2seq_lm")
    model = build_model(plan, META)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert sum(p.numel() for p in model.parameters()) == plan.size.num_parameters


# --- refusals -----------------------------------------------------------------------------------


def spoil(path, change):
    """Change the checkpoint's tensors, in ways that the plan does not look for."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def rename(tensors):
    tensors["model.layers.0.mlp.up.weight"] = tensors.pop("model.layers.0.mlp.up_proj.weight")


SPOILT = {
    "missing": (lambda t: t.pop("model.norm.weight"), "lacks 1 tensor of LlamaForCausalLM: "),
    "renamed": (rename, "of LlamaForCausalLM: model.layers.0.mlp.up_proj.weight"),
    "unexpected": (
        lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}),
        "model.layers.0.self_attn.q_proj.bias",
    ),
    "another shape": (
        lambda t: t.update({"model.norm.weight": torch.zeros(8)}),
        "model.norm.weight is [8] instead of [32]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SPOILT)
def test_body_tensors_must_match(saved, tmp_path, case):
    change, words = SPOILT[case]
    path = shutil.copytree(saved["llama"], tmp_path / "m")
    spoil(path, change)
    plan = checkpoint_plan(path)
    with pytest.raises(RunError) as caught:
        build_model(plan, CPU)
    text = str(caught.value)
    assert text.startswith(f"model.name_or_path = {path}: ")
    assert words in text
    assert "\n" not in text


def test_file_truncated_after_planning_is_rejected(saved, tmp_path):
    path = shutil.copytree(saved["llama"], tmp_path / "m")
    plan = checkpoint_plan(path)
    (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:-64])
    with pytest.raises(ChangedError, match="has changed since the run was planned"):
        check_inputs(plan)


TIES = [("llama", True), ("llama", False), ("bert", True), ("bert", False), ("gpt_neox", True)]


@pytest.mark.parametrize(("kind", "tied"), TIES, ids=str)
def test_tied_output_is_read_from_the_tensors(tmp_path, kind, tied):
    """A flag of config.json that says the contrary changes nothing, and is saved as it is true."""
    from eke.training.model.save_model import save_pretrained

    names = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
             "intermediate_size": 64, "vocab_size": 320, "pad_token_id": 0}  # fmt: skip
    config = (
        transformers.AutoConfig.for_model(kind, **names)
        if kind == "gpt_neox"
        else make_model_config(kind)
    )
    config.tie_word_embeddings = tied
    with torch.random.fork_rng():
        plain = getattr(transformers, HEADS[own_task(kind)]).from_config(config).eval()
    plain.save_pretrained(tmp_path / "m")
    content = json.loads((tmp_path / "m" / "config.json").read_text())
    content["tie_word_embeddings"] = not tied
    (tmp_path / "m" / "config.json").write_text(json.dumps(content))
    model, report = load(tmp_path / "m", f"task={own_task(kind)}")
    assert report.new_weights == ()
    inputs = make_inputs(plain)
    assert torch.equal(model.eval()(**inputs).logits, plain(**inputs).logits)
    assert model.config.tie_word_embeddings is tied
    shared = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert shared is tied
    save_pretrained(model, tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())[
        "tie_word_embeddings"] is tied  # fmt: skip


OF_LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
OF_T5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2,
         "num_heads": 2}  # fmt: skip
OF_BART = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
           "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}  # fmt: skip
WIDTH = {"hidden_size": 32, **OF_LAYERS}
DROPPED = {
    "distilbert": (CLASSIFY[5:], {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}),
    "gpt_neo": ("causal_lm", {
        "hidden_size": 32, "num_layers": 2, "num_heads": 2,
        "attention_types": [[["global", "local"], 1]],
    }),
    "albert": (CLASSIFY[5:], {**WIDTH, "embedding_size": 32}),
    "deberta-v2": (CLASSIFY[5:], {**WIDTH, "pooler_hidden_size": 32}),
    "bart": ("seq2seq_lm", OF_BART),
    "opt": ("causal_lm", {**WIDTH, "ffn_dim": 64, "word_embed_proj_dim": 32}),
    "xlnet": (CLASSIFY[5:], {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64}),
    "starcoder2": ("causal_lm", {**WIDTH, "num_key_value_heads": 1}),
    "umt5": ("seq2seq_lm", OF_T5),
    "gptj": ("causal_lm", {"n_embd": 32, "n_layer": 2, "n_head": 2, "rotary_dim": 8}),
}  # fmt: skip
"""Kind of model -> its task and the sizes of a tiny one."""


class RecordedDropouts(TorchFunctionMode):
    """Context that records the probability of each dropout, and attention, that trains."""

    def __init__(self):
        super().__init__()
        self.used = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        given = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.used.add(given.get("dropout_p", args[4] if len(args) > 4 else 0.0))
        elif func is F.dropout and given["training"]:
            self.used.add(given["p"])
        elif func is torch.dropout and given.get("train", args[-1]):
            self.used.add(given.get("p", args[1] if len(args) > 1 else 0.0))
        return func(*args, **given)


@pytest.mark.parametrize("kind", DROPPED)
def test_every_dropout_of_a_forward_pass_has_the_configured_value(kind):
    from eke.training.model.dropout import set_dropout
    from eke.training.model.model_checks import probe_inputs

    task, sizes = DROPPED[kind]
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}
    config = transformers.AutoConfig.for_model(kind, vocab_size=320, **sizes, **ids)
    traps = {name: value for name, value in vars(config).items() if "layerdrop" in name}
    set_dropout(config, 0.3)
    assert {name: getattr(config, name) for name in traps} == traps
    model = getattr(transformers, HEADS[task]).from_config(config)
    model.eval()
    with RecordedDropouts() as recorded, torch.no_grad():
        model.train()(**probe_inputs(model, 0))
    assert recorded.used - {0.0} == {0.3}


def test_dropout_rejected_by_a_configuration_class_has_a_fix():
    from eke.training.model.dropout import set_dropout

    with pytest.raises(RunError, match=r"MptAttentionConfig.*attn_pdrop") as caught:
        set_dropout(transformers.MptConfig(), 0.3)
    assert "-> model.dropout=null" in str(caught.value)


@pytest.mark.parametrize("changes", [{"rope_parameters": 3}, {"hidden_act": "no"}], ids=str)
def test_config_unusable_by_transformers_is_rejected(saved, tmp_path, changes):
    path = shutil.copytree(saved["llama"], tmp_path / "m")
    content = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**content, **changes}))
    with pytest.raises(RunError, match=r"^model\.name_or_path = ") as caught:
        build_model(checkpoint_plan(path), CPU)
    assert "\n" not in str(caught.value)


BASES = {"bert": "BertModel", "t5": "T5Model", "mixtral": "MixtralModel"}


@pytest.mark.parametrize("family", BASES)
def test_checkpoint_without_head_is_loaded(tmp_path, family):
    with torch.random.fork_rng():
        plain = getattr(transformers, BASES[family])(make_model_config(family))
    plain.save_pretrained(tmp_path / "base")
    model, _ = load(tmp_path / "base", CLASSIFY)
    own = getattr(model, model.base_model_prefix).state_dict()
    shared = set(own) & set(plain.state_dict())
    assert len(shared) > 10
    assert all(torch.equal(own[name], plain.state_dict()[name]) for name in shared)


@pytest.mark.parametrize("kind", ["distilbert", "opt"])
def test_architectures_without_formulas_are_loaded(tmp_path, kind):
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=320, hidden_size=32, dim=32, num_hidden_layers=2, n_layers=2,
        num_attention_heads=2, n_heads=2, intermediate_size=64, ffn_dim=64, hidden_dim=64,
        word_embed_proj_dim=32, pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    task = "masked_lm" if kind == "distilbert" else "causal_lm"
    with torch.random.fork_rng():
        plain = getattr(transformers, HEADS[task]).from_config(config)
    plain.save_pretrained(tmp_path)
    model, _ = load(tmp_path, f"task={task}")
    assert same_weights(model, plain)
    assert checkpoint_plan(tmp_path, f"task={task}").size.num_parameters == pytest.approx(
        sum(p.numel() for p in model.parameters())
    )
    _, gradients = step(model)
    assert set(gradients) == {n for n, p in model.named_parameters() if p.requires_grad}


def adapted(path, *overrides):
    from eke.training.model.save_model import build_trainable
    from eke.training.optimizer.update import parameter_groups

    plan = checkpoint_plan(path, *overrides)
    model, _ = build_trainable(plan, CPU)
    return plan, model, {g["role"]: g["weight_decay"] for g in parameter_groups(model, 0.01)}


@pytest.mark.parametrize(("peft", "decay"), [("lora", 0.01), ("ia3", 0.0)], ids=str)
def test_rank_1_adapters_are_decayed_and_scales_are_not(saved, peft, decay):
    rank = ("peft.r=1",) if peft == "lora" else ()
    _, _, decays = adapted(saved["llama"], f"peft={peft}", *rank)
    assert set(decays.values()) == {decay}


@pytest.mark.parametrize(
    ("family", "overrides", "warned"),
    [("llama", (), False), ("bert", (CLASSIFY,), True)],
    ids=str,
)
def test_lost_small_updates_are_warned_about(saved, family, overrides, warned):
    typed = ("peft=lora", "peft.r=2", "precision=bf16_pure", "optimizer.lr=1e-3")
    plan, model, _ = adapted(saved[family], *typed, *overrides)
    formats = {p.dtype for p in model.parameters() if p.requires_grad}
    assert (torch.bfloat16 in formats) is warned
    assert any("rounds away" in str(w) for w in plan.warnings) is warned
    names = model.peft_config["default"].modules_to_save
    assert names == (["classifier", "pooler"] if warned else None)


def test_experts_without_adapters_are_named(saved):
    _, model, _ = adapted(saved["mixtral"], "peft=lora", "peft.r=2")
    stacked = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    share = stacked / sum(p.numel() for p in model.parameters() if not p.requires_grad)
    assert f"{share:.0%} of the parameters" in model.without_adapters[0]
    assert adapted(saved["llama"], "peft=lora", "peft.r=2")[1].without_adapters == []


def test_adapter_next_to_full_weights_is_not_loaded(tmp_path):
    """transformers would freeze the model, or load the one that the adapter names instead."""
    folder = save_checkpoint(tmp_path / "whole", "llama")
    whole, _ = load(folder)
    adapter = {"peft_type": "LORA", "r": 2, "base_model_name_or_path": "another/model"}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    model, report = load(folder)
    assert same_weights(model, whole)
    assert all(p.requires_grad for p in model.parameters())
    assert "adapter_config.json" in report.warnings[0]
