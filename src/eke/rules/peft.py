"""Rules about parameter-efficient fine-tuning."""

from typing import cast

from eke.common.units import format_bytes
from eke.config.schema import (
    Adapters,
    Checkpointing,
    Compute,
    Lora,
    MixtralModel,
    PretrainedModel,
    QLora,
    TrainedBias,
)
from eke.models.sizes import BFLOAT16_BYTES, FLOAT32_BYTES, choose_targets, linear_layers, structure
from eke.rules.rule import Facts, Rule, Verdict

PEFT_DOCS = "https://huggingface.co/docs/peft"

WITHOUT_BIASES = ("llama", "qwen3", "mixtral", "t5")
"""Families whose linear layers have none."""


def _adapters(facts: Facts) -> Adapters | None:
    return facts.config.peft if isinstance(facts.config.peft, Adapters) else None


def _lora(facts: Facts) -> Lora | None:
    return facts.config.peft if isinstance(facts.config.peft, Lora) else None


def _option(facts: Facts) -> str:
    return facts.config.peft.option


def _unmatched(facts: Facts) -> str:
    """Typed names that no layer has; `[]` where none was typed."""
    peft = _adapters(facts)
    if peft is None or peft.target_modules is None or facts.config.model.family == "other":
        return ""
    targets = choose_targets(facts.config, linear_layers(structure(facts.config)))
    return ", ".join(targets.unmatched) or ("" if targets.modules else "[]")


def _layer_names(facts: Facts) -> str:
    names = linear_layers(structure(facts.config))
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))


def _trains_biases(facts: Facts) -> bool:
    lora = _lora(facts)
    return lora is not None and lora.bias is TrainedBias.lora_only


def _expert_bytes(facts: Facts) -> int:
    """The dequantised experts of all layers, in the format that autocast multiplies them in."""
    model = cast(MixtralModel, facts.config.model)
    one = 3 * model.hidden_size * model.intermediate_size
    narrow = facts.config.precision.compute is not Compute.float32
    each = BFLOAT16_BYTES if narrow else FLOAT32_BYTES
    return each * one * model.num_local_experts * model.num_hidden_layers


RULES: tuple[Rule, ...] = (
    Rule(
        id="adapted_layers_exist",
        verdict=Verdict.impossible,
        path="peft.target_modules",
        when=lambda f: bool(_unmatched(f)),
        value=_unmatched,
        why=lambda f: (
            f"names no linear layer in a Transformer layer of model={f.config.model.option}, "
            f"which has {_layer_names(f)}"
        ),
        fix=lambda f: "peft.target_modules=null",
        source=PEFT_DOCS,
        sized=True,
    ),
    Rule(
        id="adapters_on_random_weights",
        verdict=Verdict.unsafe,
        path="peft",
        when=lambda f: _adapters(f) is not None and not isinstance(f.config.model, PretrainedModel),
        value=_option,
        why=lambda f: (
            f"adapts model={f.config.model.option}, whose weights are random and stay so: it "
            "measures speed and memory, and learns little"
        ),
        fix=lambda f: (
            "peft=none   (or: model=pretrained model.name_or_path=FOLDER_OR_HUB_NAME peft="
            f"{_option(f)})"
        ),
        source="Hu et al. 2021, arXiv:2106.09685, section 4.1: updates of pretrained weights",
    ),
    Rule(
        id="adapter_rank_saves_nothing",
        verdict=Verdict.unsafe,
        path="peft.r",
        when=lambda f: (
            (lora := _lora(f)) is not None and 0 < f.config.model.hidden_size <= 2 * lora.r
        ),
        value=lambda f: cast(Lora, f.config.peft).r,
        why=lambda f: (
            f"makes adapters with no fewer numbers than the matrices of width "
            f"{f.config.model.hidden_size} they adapt: 2 x r x width against width x width"
        ),
        fix=lambda f: f"peft.r={max(1, f.config.model.hidden_size // 8)}",
        source="arXiv:2106.09685, section 4.1",
    ),
    Rule(
        id="rslora_needs_rank",
        verdict=Verdict.no_effect,
        path="peft.use_rslora",
        when=lambda f: (lora := _lora(f)) is not None and lora.use_rslora and lora.r == 1,
        value=lambda f: cast(Lora, f.config.peft).use_rslora,
        why=lambda f: "divides by the square root of peft.r, and that of 1 is 1",
        fix=lambda f: "peft.use_rslora=false",
        source="arXiv:2312.03732",
    ),
    Rule(
        id="adapted_layers_have_biases",
        verdict=Verdict.no_effect,
        path="peft.bias",
        when=lambda f: _trains_biases(f) and f.config.model.family in WITHOUT_BIASES,
        value=lambda f: cast(Lora, f.config.peft).bias.value,
        why=lambda f: f"a {f.config.model.family} model's linear layers have no biases to train",
        fix=lambda f: "peft.bias=none",
        source="eke.models.families",
    ),
    Rule(
        id="biases_of_four_bit_layers",
        verdict=Verdict.impossible,
        path="peft.bias",
        when=lambda f: (
            _trains_biases(f)
            and isinstance(f.config.peft, QLora)
            and f.config.precision.compute is not Compute.float32
        ),
        value=lambda f: cast(Lora, f.config.peft).bias.value,
        why=lambda f: (
            f"bitsandbytes rounds the biases of 4-bit layers to {f.config.precision.compute.value} "
            "in the first forward pass, under the optimizer's hands"
        ),
        fix=lambda f: "peft.bias=none",
        source="seen: Linear4bit.forward assigns bias.data",
        versions="bitsandbytes 0.50",
    ),
    Rule(
        id="four_bit_experts_are_kept",
        verdict=Verdict.unsafe,
        path="peft",
        when=lambda f: (
            isinstance(f.config.peft, QLora)
            and f.config.model.family == "mixtral"
            and f.config.memory.checkpointing is Checkpointing.off
        ),
        value=_option,
        why=lambda f: (
            "experts are dequantised when their layer runs, and kept for the backward pass: "
            f"{format_bytes(_expert_bytes(f))} in all; recomputation keeps one layer's"
        ),
        fix=lambda f: "memory=checkpointing",
        source="seen: bitsandbytes.nn.parametrize dequantises outside of autograd's own function",
        versions="bitsandbytes 0.50, torch 2.13",
    ),
)
