"""Families without a record: packing and the fused loss, where source and built model allow it.

Each checkpoint is made here. A step is compared with the padded rows, or with the plain loss.
"""

import json

import pytest
import transformers
from checkpoints import VOCABULARY, save_checkpoint
from equivalence_compare import largest_difference

from eke.common.errors import ConfigError, RunError
from eke.models.checkpoints.architecture import change_of_logits, keeps_samples_apart
from eke.plan.record import metrics

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": VOCABULARY,
}
GATED = {**SIZES, "num_key_value_heads": 1, "intermediate_size": 64}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

FAMILIES = {
    "mistral": ("Mistral", GATED),
    "qwen2": ("Qwen2", GATED),
    "phi3": ("Phi3", GATED),
    "olmo2": ("Olmo2", GATED),
    "smollm3": ("SmolLM3", GATED),
    "stablelm": ("StableLm", GATED),
    "gpt_neox": ("GPTNeoX", {**SIZES, "intermediate_size": 64}),
    "falcon": ("Falcon", {**SIZES, "new_decoder_architecture": True, "alibi": False}),
    "opt": ("OPT", {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "gemma3_text": ("Gemma3", {**GATED, "head_dim": 16}),
    "gemma2": ("Gemma2", {**GATED, "head_dim": 16, "final_logit_softcapping": 2.0}),
    "granite": ("Granite", {**GATED, "logits_scaling": 8.0}),
    "cohere": ("Cohere", {**GATED, "logit_scale": 4.0}),
    "bloom": ("Bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 2, "vocab_size": VOCABULARY}),
}

PACKED = ["mistral", "qwen2", "phi3", "olmo2", "smollm3", "stablelm", "gpt_neox", "gemma3_text"]
FUSED = ["mistral", "qwen2", "phi3", "olmo2", "smollm3", "stablelm", "gpt_neox", "falcon", "opt",
         "gemma2", "gemma3_text", "granite", "cohere"]  # fmt: skip
RAGGED = ("data.lengths=uniform", "data.min_len=5", "data.seq_len=32", "batch.per_device=4")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Family -> folder of a small checkpoint; the same one for each test."""
    root, made = tmp_path_factory.mktemp("models"), {}

    def make(kind: str):
        if kind not in made:
            name, sizes = FAMILIES[kind]
            suffix = "TextConfig" if kind == "gemma3_text" else "Config"
            config = getattr(transformers, f"{name}{suffix}")(**sizes, **IDS)
            transformers.set_seed(0)
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained(root / kind)
            made[kind] = root / kind
        return made[kind]

    return make


def base(folder) -> tuple[str, ...]:
    typed = ("model=pretrained", f"model.name_or_path={folder}", "model.dropout=0")
    return (*typed, "data=synthetic", "data.max_token=200", *RAGGED, "train.steps=2")


@pytest.mark.slow
@pytest.mark.parametrize("kind", PACKED)
def test_packed_samples_are_independent(kind, checkpoint, curve_of, baseline_of) -> None:
    typed = base(checkpoint(kind))
    packed = curve_of(*typed, "data.packing=padding_free")
    assert largest_difference(baseline_of(*typed), packed) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("kind", FUSED)
def test_fused_loss_computes_the_same_step(kind, checkpoint, curve_of, baseline_of) -> None:
    typed = base(checkpoint(kind))
    fused = curve_of(*typed, "kernels=fused_linear_cross_entropy")
    assert largest_difference(baseline_of(*typed), fused) < 1e-5


def routed_curve(job) -> list[float]:
    """Cross-entropy, router loss and gradient norm of each step, one after the other."""
    rows, _ = metrics.read_rows(job.paths.metrics)
    names = (metrics.LOSS, metrics.ROUTER_LOSS, metrics.GRAD_NORM)
    return [row[name] for row in rows if metrics.LOSS in row for name in names]


@pytest.mark.slow
def test_router_loss_agrees_with_techniques(tmp_path, job_of) -> None:
    """The same steps by all of them, and the saved flag is the checkpoint's."""
    folder = save_checkpoint(tmp_path / "moe", "mixtral", output_router_logits=True,
                             router_aux_loss_coef=0.5)  # fmt: skip
    typed = (*base(folder), "train.record_grad_norm=true")
    cut = ("batch.per_device=2", "batch.accumulation=2")
    others = ("engine=trainer", "memory=checkpointing", "data.packing=padding_free")
    whole, half = routed_curve(job_of("whole", *typed)), routed_curve(job_of("half", *typed, *cut))
    job = job_of("others", *typed, *cut, *others)
    assert routed_curve(job) == pytest.approx(half, rel=1e-5)
    assert half[0] == pytest.approx(whole[0])
    assert half[1] != pytest.approx(whole[1], rel=1e-4), "a mean over each micro-batch"
    saved = json.loads((job.paths.model / "config.json").read_text())
    assert saved["output_router_logits"] is True


def refused(typed: tuple[str, ...], make_plan) -> list[str]:
    """Rules that refuse it."""
    with pytest.raises(ConfigError) as caught:
        make_plan(*typed)
    return [problem.id for problem in caught.value.problems]


@pytest.mark.slow
@pytest.mark.parametrize("more", [
    ("kernels=sparse_prediction",), ("peft=lora",), ("compile=eager", "data.pad_to_multiple_of=32"),
    ("engine=trainer",),
    ("batch.per_device=2", "batch.accumulation=2"),
], ids=lambda more: more[0])  # fmt: skip
def test_capped_logits_agree_with_techniques(more, checkpoint, curve_of, baseline_of) -> None:
    typed, fused = base(checkpoint("gemma2")), "kernels.fused_linear_cross_entropy=true"
    plain = tuple(word for word in more if word.startswith("peft"))
    assert largest_difference(baseline_of(*typed, *plain), curve_of(*typed, fused, *more)) < 1e-5


@pytest.mark.slow
def test_mask_without_positions_is_rejected_before_training(checkpoint, make_plan) -> None:
    typed = (*base(checkpoint("bloom")), "data.packing=on")
    assert refused(typed, make_plan) == ["packing_needs_causal_decoder"]


@pytest.mark.slow
def test_built_model_is_checked_if_its_source_is_misleading(
    checkpoint, curve_of, monkeypatch
) -> None:
    for name, answer in (("change_of_logits", ""), ("keeps_samples_apart", True)):
        monkeypatch.setattr(
            f"eke.models.checkpoints.architecture.{name}", lambda *_, answer=answer: answer
        )
    with pytest.raises(RunError, match=r"changes its logits.*kernels=none"):
        curve_of(*base(checkpoint("granite")), "kernels=fused_linear_cross_entropy")
    with pytest.raises(RunError, match=r"data.packing=off"):
        curve_of(*base(checkpoint("bloom")), "data.packing=on")


@pytest.mark.parametrize(
    ("kind", "change", "apart"),
    [
        ("mistral", "", True),
        ("gemma2", "cap config.final_logit_softcapping", True),
        ("granite", "/ config.logits_scaling", True),
        ("cohere", "* logit_scale", True),
        ("falcon_h1", None, True),
        ("gpt_oss", "", False),
        ("mpt", "", False),
        ("nobodys", None, False),
    ],
)
def test_source_of_a_model_class_is_classified(kind, change, apart) -> None:
    assert (change_of_logits(kind, "causal_lm"), keeps_samples_apart(kind)) == (change, apart)
