"""Rules about parameter-efficient fine-tuning."""

from typing import cast

from eke.common.errors import Fix
from eke.common.text import format_bytes
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
from eke.models.families import FLOAT32_BYTES
from eke.models.sizes import BFLOAT16_BYTES, choose_targets, linear_layers, structure, why_not_fused
from eke.rules.rule import Rule, RuleInputs, unsafe, without_effect


def _adapters(facts: RuleInputs) -> Adapters | None:
    return facts.config.peft if isinstance(facts.config.peft, Adapters) else None


def _lora(facts: RuleInputs) -> Lora | None:
    return facts.config.peft if isinstance(facts.config.peft, Lora) else None


def _unmatched(facts: RuleInputs) -> str:
    """Return names in the override that match no layer, `[]` if no layer is adapted, else ""."""
    peft = _adapters(facts)
    if peft is None or peft.target_modules is None or not facts.model_family.is_known:
        return ""
    targets = choose_targets(facts.config, linear_layers(structure(facts.config)))
    return ", ".join(targets.unmatched) or ("" if targets.modules else "[]")


def _expert_bytes(facts: RuleInputs) -> int:
    """Return the bytes of all experts' weights, dequantised to the format of their products."""
    model = cast(MixtralModel, facts.config.model)
    one = 3 * model.hidden_size * model.intermediate_size
    narrow = facts.config.precision.compute is not Compute.float32
    each = BFLOAT16_BYTES if narrow else FLOAT32_BYTES
    return each * one * model.num_local_experts * model.num_hidden_layers


RULES = dict(
    adapted_layers_exist=Rule(
        key="peft.target_modules",
        when=_unmatched,
        value=_unmatched,
        why=lambda f: (
            f"matches no linear layer of model={f.config.model.option}. Available: "
            + ", ".join(
                dict.fromkeys(
                    name.rpartition(".")[2] for name in linear_layers(structure(f.config))
                )
            )
        ),
        source="https://huggingface.co/docs/peft",
        sized=True,
    ),
    adapters_on_random_weights=unsafe(
        key="peft",
        when=lambda f: _adapters(f) and not isinstance(f.config.model, PretrainedModel),
        why=lambda f: (
            f"model={f.config.model.option} has random weights, which adapters leave frozen. "
            "The run only measures speed and memory"
        ),
        fix=lambda f: Fix(
            "peft=none",
            remark="or: model=pretrained model.name_or_path=FOLDER_OR_HUB_NAME peft="
            f"{f.config.peft.option}",
        ),
        source="Hu et al. 2021, arXiv:2106.09685, section 4.1: updates of pretrained weights",
    ),
    adapter_rank_saves_nothing=unsafe(
        key="peft.r",
        when=lambda f: (lora := _lora(f)) and 0 < f.config.model.hidden_size <= 2 * lora.r,
        why=lambda f: (
            "adapters have at least as many numbers as the matrices of width "
            f"{f.config.model.hidden_size} (2 x r x width)"
        ),
        fix=lambda f: Fix(f"peft.r={max(1, f.config.model.hidden_size // 8)}"),
        source="arXiv:2106.09685, section 4.1",
    ),
    rslora_needs_rank=without_effect(
        key="peft.use_rslora",
        when=lambda f: (lora := _lora(f)) and lora.r == 1,
        why="divides by the square root of peft.r, which is 1",
        source="arXiv:2312.03732",
    ),
    adapters_are_fused=without_effect(
        key="peft.fused",
        when=lambda f: why_not_fused(f.config),
        why=lambda f: f"PEFT's own forward pass is used with {why_not_fused(f.config)}",
        source="eke.training.model.fused_adapters",
    ),
    adapted_layers_have_biases=without_effect(
        key="peft.bias",
        when=lambda f: not f.model_family.has_biases,
        why=lambda f: f"the linear layers of {f.model_family.name} have no biases",
        source="eke.models.families",
    ),
    biases_of_four_bit_layers=Rule(
        key="peft.bias",
        when=lambda f: (
            isinstance(f.config.peft, QLora)
            and f.config.peft.bias is TrainedBias.lora_only
            and f.config.precision.compute is not Compute.float32
        ),
        why=lambda f: (
            "bitsandbytes rounds trained biases of 4-bit layers to "
            f"{f.config.precision.compute.value} in the first forward pass"
        ),
        source="measured: Linear4bit.forward assigns bias.data",
        versions="bitsandbytes 0.50",
    ),
    four_bit_experts_are_kept=unsafe(
        key="peft",
        when=lambda f: (
            (isinstance(f.config.peft, QLora) or getattr(f.config.peft, "experts", False))
            and f.model_family.is_moe
            and f.config.memory.checkpointing is Checkpointing.off
        ),
        why=lambda f: (
            f"{'dequantised' if isinstance(f.config.peft, QLora) else 'updated'} experts of all "
            f"layers stay in memory until the backward pass: {format_bytes(_expert_bytes(f))}"
        ),
        fix=Fix("memory=checkpointing"),
        source="measured: bitsandbytes.nn.parametrize dequantises outside its autograd function",
        versions="bitsandbytes 0.50, torch 2.13",
    ),
)
