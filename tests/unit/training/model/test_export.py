"""What is saved has the hub's layout: plain transformers loads it, and so does eke."""

import json

import pytest
import torch
import transformers
from checkpoints import make_tokenizer, save_checkpoint
from unit.models.sizes.configs import FAMILY_CASES
from unit.training.model.plans import hand_plan
from unit.training.model.steps import make_inputs, same_weights

from eke.common.errors import RunError
from eke.training.model.build_model import build_model
from eke.training.model.model_checks import HEADS
from eke.training.model.save_model import load_weights, save_pretrained

CPU = torch.device("cpu")


def build(option, task, *overrides):
    return build_model(hand_plan(f"model={option}", f"task={task}", *overrides), CPU)


def logits(model):
    with torch.no_grad():
        return model.eval()(**make_inputs(model)).logits


def assert_round_trip(model, option, task, folder, *overrides):
    save_pretrained(model, folder)
    plain = getattr(transformers, HEADS[task]).from_pretrained(folder, dtype=torch.float32)
    assert type(plain) is type(model)
    assert torch.equal(logits(plain), logits(model))
    again = build(option, task, "seed=5", *overrides)
    assert not same_weights(again, model)
    load_weights(again, folder)
    assert same_weights(again, model)
    shared = {name for name, _ in model.named_parameters()}
    assert {name for name, _ in again.named_parameters()} == shared  # tied weights stay tied


UNTIED = "model.tie_word_embeddings=false"
ROUND_TRIPS = [
    *FAMILY_CASES,
    ("tiny_bert", "sequence_classification"),
    ("tiny_t5", "sequence_classification"),
    ("tiny_bert", "masked_lm", UNTIED),
    ("tiny_gpt2", "causal_lm", UNTIED),
    ("tiny", "causal_lm", UNTIED, "model.rope_scaling_factor=8"),
]


@pytest.mark.parametrize("case", ROUND_TRIPS, ids=" ".join)
def test_transformers_loads_export_with_equal_logits(case, tmp_path):
    option, task, *overrides = case
    assert_round_trip(build(*case), option, task, tmp_path / "saved", *overrides)


def test_large_model_is_exported_in_shards(tmp_path):
    model = build("tiny_moe", "causal_lm")
    save_pretrained(model, tmp_path, shard_bytes=1_000_000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert not (tmp_path / "model.safetensors").exists()
    again = build("tiny_moe", "causal_lm", "seed=5")
    load_weights(again, tmp_path)
    assert same_weights(again, model)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(plain), logits(model))


def test_exported_files_and_content(tmp_path):
    model = build("tiny", "causal_lm")
    save_pretrained(model, tmp_path, make_tokenizer())
    assert {p.name for p in tmp_path.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["pad_token_id"], config["bos_token_id"], config["eos_token_id"]) == (0, 1, 2)
    assert config["dtype"] == "float32"
    assert transformers.AutoConfig.from_pretrained(tmp_path).use_cache is True
    assert model.config.use_cache is False  # training goes on
    words = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert words.decode(words("the quick fox").input_ids) == "the quick fox"
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert plain.generate(torch.tensor([[9, 10]]), max_new_tokens=3, do_sample=False).shape == (
        1,
        5,
    )


def test_invalid_generation_config_does_not_stop_saving(tmp_path):
    path = save_checkpoint(tmp_path / "odd", "llama")
    odd = {"temperature": 0.6, "top_p": 0.9, "do_sample": False}
    (path / "generation_config.json").write_text(json.dumps(odd))
    model = transformers.LlamaForCausalLM.from_pretrained(path)
    save_pretrained(model, tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert saved["temperature"] == 0.6


# --- refusals -----------------------------------------------------------------------------------


def change(folder, edit):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


WRONG = {
    "missing": (lambda t: t.pop("model.norm.weight"), "lacks 1 tensor: model.norm.weight"),
    "unknown": (lambda t: t.update(x=torch.ones(1)), "x is not a tensor of LlamaForCausalLM"),
    "of experts": (lambda t: t.pop("model.norm.weight"), r"model\.norm\.weight"),
    "shape": (lambda t: t.update({"model.norm.weight": torch.ones(3)}), r"\[3\], the model's is"),
    "format": (
        lambda t: t.update({"model.norm.weight": torch.ones(128, dtype=torch.bfloat16)}),
        "is torch.bfloat16",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_loading_is_strict(case, tmp_path):
    edit, words = WRONG[case]
    model = build("tiny_moe" if case == "of experts" else "tiny", "causal_lm")
    save_pretrained(model, tmp_path)
    change(tmp_path, edit)
    with pytest.raises(RunError, match=words):
        load_weights(model, tmp_path)
