"""Rules about optimizers and parameter-efficient fine-tuning."""

from typing import cast

from eke.common.errors import Fix
from eke.common.text import format_bytes
from eke.config.schema import (
    Adapters,
    Checkpointing,
    Compute,
    Implementation,
    Lora,
    MixtralModel,
    PretrainedModel,
    QLora,
    TrainedBias,
    Weights,
)
from eke.models.families import FLOAT32_BYTES, Role
from eke.models.sizes import (
    BFLOAT16_BYTES,
    choose_targets,
    linear_layers,
    option_of,
    projection_rank,
    quantises_state,
    structure,
    training_structure,
    why_not_fused,
)
from eke.rules.rule import (
    VOLTA,
    Facts,
    Rule,
    capability_of,
    needs_compiler,
    older_than,
    unsafe,
    without_effect,
)


def _library(facts: Facts) -> str:
    return facts.optimizer.package.partition(".")[0]


def _shortest_side(facts: Facts) -> int:
    """Of the matrices inside Transformer layers; 0 where there are none."""
    weights = structure(facts.config).weights
    return min((min(w.shape) for w in weights if w.role is Role.hidden), default=0)


def _rank_limit(facts: Facts) -> int:
    """The least rank at which states in the subspace, with its projection, are no smaller."""
    # AdamW keeps 2 x long x short numbers of a matrix, a projection 2 x long x rank + rank x short.
    weights = [w for w in structure(facts.config).weights if w.role is Role.hidden]
    return min(
        (-(-2 * max(w.shape) * min(w.shape) // (2 * max(w.shape) + min(w.shape))) for w in weights),
        default=0,
    )


def _trains_no_matrix(facts: Facts) -> bool:
    """Whether nothing of a known architecture is trained but vectors, tables and heads."""
    weights = training_structure(facts.config).weights
    found = any(w.trained and w.role is Role.hidden for w in weights)
    return facts.model_family.is_known and not found


RULES: tuple[Rule, ...] = (
    Rule(
        id="muon_needs_matrices",
        key="optimizer",
        when=lambda f: (
            f.optimizer.needs_matrices and (f.config.peft.option == "ia3" or _trains_no_matrix(f))
        ),
        why=lambda f: (
            "updates matrices inside Transformer layers, of which "
            f"{'model.freeze' if f.config.model.freeze else 'peft=ia3'} trains none"
        ),
        fix=Fix("optimizer=adamw"),
        sized=True,
        source="https://docs.pytorch.org/docs/stable/generated/torch.optim.Muon.html",
    ),
    without_effect(
        id="implementation_is_adamws",
        key="optimizer.implementation",
        when=lambda f: (
            option_of(f.config.optimizer) == f.config.optimizer.option
            and getattr(f.config.optimizer, "implementation", Implementation.auto)
            is not Implementation.auto
        ),
        why=lambda f: f"optimizer={f.config.optimizer.option} has one implementation",
        fix=Fix("optimizer.implementation=auto", remark="or optimizer=adamw, which has several"),
        source="eke.models.sizes.option_of",
    ),
    Rule(
        id="apex_needs_cuda",
        key="optimizer",
        when=lambda f: f.optimizer.cuda_only and f.on_cpu,
        value=lambda f: option_of(f.config.optimizer),
        why=lambda f: f"{_library(f)} has kernels for CUDA only; {f.device.name} is a CPU",
        fix=lambda f: Fix(
            "optimizer.implementation=fused"
            if option_of(f.config.optimizer) != f.config.optimizer.option
            else f"optimizer={f.optimizer.twin}"
        ),
        source="https://nvidia.github.io/apex/optimizers.html",
    ),
    needs_compiler(
        "torchao_needs_compiler",
        "optimizer",
        lambda f: f.optimizer.compiles,
        Fix("optimizer=adamw_8bit"),
        "https://github.com/pytorch/ao/tree/main/torchao/optim",
        versions="torchao 0.18",
        use=lambda f: f"{_library(f)} compiles its step; ",
    ),
    Rule(
        id="torchao_needs_volta",
        key="optimizer",
        when=lambda f: f.optimizer.compiles and older_than(f, VOLTA),
        why=lambda f: (
            f"{_library(f)} compiles its step to Triton, which needs CUDA compute capability 7.0 "
            f"or newer; {capability_of(f)}"
        ),
        fix=Fix("optimizer=adamw_8bit"),
        source="https://docs.pytorch.org/docs/stable/torch.compiler.html",
    ),
    without_effect(
        id="paging_needs_cuda",
        key="optimizer",
        when=lambda f: f.optimizer.pages and f.on_cpu,
        why="pages are moved between a GPU and its host; on a CPU there is one memory",
        fix=Fix("optimizer=adamw_8bit"),
        source="bitsandbytes, optim/optimizer.py, get_state_buffer",
        versions="bitsandbytes 0.50",
    ),
    without_effect(
        id="rounding_needs_bf16_weights",
        key="optimizer",
        when=lambda f: (
            f.optimizer.rounds_at_random and f.config.precision.weights is not Weights.bfloat16
        ),
        why="weights are float32, which a step stores as it computes them: unrounded",
        fix=Fix("optimizer=adamw"),
        source="torchao, optim/adam.py: bf16_stochastic_round and p.dtype is torch.bfloat16",
        versions="torchao 0.18",
    ),
    unsafe(
        id="schedule_free_has_no_schedule",
        key="schedule",
        when=lambda f: f.optimizer.averages and f.config.schedule.option != "constant",
        why=lambda f: (
            f"optimizer={f.config.optimizer.option} averages weights instead of lowering its "
            "learning rate; with both, the last weights hardly move and the average stays behind"
        ),
        fix=Fix("schedule=constant"),
        source="arXiv:2405.15682",
    ),
    without_effect(
        id="all_tensors_are_too_small_for_8_bits",
        key="optimizer",
        when=lambda f: (
            f.optimizer.quantises
            and not any(quantises_state(f.config.optimizer, w) for w in structure(f.config).weights)
        ),
        why=lambda f: (
            "no tensor of this model is quantised: they have fewer than "
            f"{getattr(f.config.optimizer, 'min_8bit_size', 4096)} numbers, are embeddings, or "
            "are not whole blocks"
        ),
        fix=lambda f: Fix(f"optimizer={f.optimizer.unquantised}"),
        source="bitsandbytes, optim/optimizer.py, init_state; torchao, optim/adam.py, _new_buffer",
        versions="bitsandbytes 0.50, torchao 0.18",
        sized=True,
    ),
    without_effect(
        id="rank_saves_nothing",
        key="optimizer.rank",
        when=lambda f: f.optimizer.projects and projection_rank(f.config) >= _rank_limit(f),
        value=lambda f: projection_rank(f.config),
        why=lambda f: (
            "its projections and moments are as large as AdamW's moments, of a matrix whose "
            f"shorter side is {_shortest_side(f)}; below {_rank_limit(f)} they are smaller"
        ),
        # A quarter of the shortest side, where that is a rank at all.
        fix=lambda f: Fix(
            f"optimizer.rank={rank}"
            if 0 < (rank := _shortest_side(f) // 4) < _rank_limit(f)
            else "optimizer=adamw"
        ),
        source="2 x long x rank + rank x short against 2 x long x short numbers",
        sized=True,
    ),
)


def _adapters(facts: Facts) -> Adapters | None:
    return facts.config.peft if isinstance(facts.config.peft, Adapters) else None


def _lora(facts: Facts) -> Lora | None:
    return facts.config.peft if isinstance(facts.config.peft, Lora) else None


def _unmatched(facts: Facts) -> str:
    """Names in the override that no layer has; `[]` without an override."""
    peft = _adapters(facts)
    if peft is None or peft.target_modules is None or not facts.model_family.is_known:
        return ""
    targets = choose_targets(facts.config, linear_layers(structure(facts.config)))
    return ", ".join(targets.unmatched) or ("" if targets.modules else "[]")


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


PEFT_RULES: tuple[Rule, ...] = (
    Rule(
        id="adapted_layers_exist",
        key="peft.target_modules",
        when=_unmatched,
        value=_unmatched,
        why=lambda f: (
            f"names no linear layer in a Transformer layer of model={f.config.model.option}, "
            "which has "
            + ", ".join(
                dict.fromkeys(
                    name.rpartition(".")[2] for name in linear_layers(structure(f.config))
                )
            )
        ),
        fix=Fix("peft.target_modules=null"),
        source="https://huggingface.co/docs/peft",
        sized=True,
    ),
    unsafe(
        id="adapters_on_random_weights",
        key="peft",
        when=lambda f: _adapters(f) and not isinstance(f.config.model, PretrainedModel),
        why=lambda f: (
            f"adapts model={f.config.model.option}, whose weights are random and stay so: it "
            "measures speed and memory, and learns little"
        ),
        fix=lambda f: Fix(
            "peft=none",
            remark="or: model=pretrained model.name_or_path=FOLDER_OR_HUB_NAME peft="
            f"{f.config.peft.option}",
        ),
        source="Hu et al. 2021, arXiv:2106.09685, section 4.1: updates of pretrained weights",
    ),
    unsafe(
        id="adapter_rank_saves_nothing",
        key="peft.r",
        when=lambda f: (lora := _lora(f)) and 0 < f.config.model.hidden_size <= 2 * lora.r,
        why=lambda f: (
            f"makes adapters with no fewer numbers than the matrices of width "
            f"{f.config.model.hidden_size} they adapt: 2 x r x width against width x width"
        ),
        fix=lambda f: Fix(f"peft.r={max(1, f.config.model.hidden_size // 8)}"),
        source="arXiv:2106.09685, section 4.1",
    ),
    without_effect(
        id="rslora_needs_rank",
        key="peft.use_rslora",
        when=lambda f: (lora := _lora(f)) and lora.use_rslora and lora.r == 1,
        why="divides by the square root of peft.r, and that of 1 is 1",
        fix=Fix("peft.use_rslora=false"),
        source="arXiv:2312.03732",
    ),
    without_effect(
        id="adapters_are_fused",
        key="peft.fused",
        when=lambda f: getattr(f.config.peft, "fused", False) and bool(why_not_fused(f.config)),
        why=lambda f: f"uses PEFT's own forward passes with {why_not_fused(f.config)}",
        fix=Fix("peft.fused=false"),
        source="eke.training.model.fused_adapters",
    ),
    without_effect(
        id="adapted_layers_have_biases",
        key="peft.bias",
        when=lambda f: _trains_biases(f) and not f.model_family.has_biases,
        why=lambda f: f"a {f.model_family.name} model's linear layers have no biases to train",
        fix=Fix("peft.bias=none"),
        source="eke.models.families",
    ),
    Rule(
        id="biases_of_four_bit_layers",
        key="peft.bias",
        when=lambda f: (
            _trains_biases(f)
            and isinstance(f.config.peft, QLora)
            and f.config.precision.compute is not Compute.float32
        ),
        why=lambda f: (
            f"bitsandbytes rounds the biases of 4-bit layers to {f.config.precision.compute.value} "
            "in the first forward pass, under the optimizer's hands"
        ),
        fix=Fix("peft.bias=none"),
        source="seen: Linear4bit.forward assigns bias.data",
        versions="bitsandbytes 0.50",
    ),
    unsafe(
        id="four_bit_experts_are_kept",
        key="peft",
        when=lambda f: (
            (isinstance(f.config.peft, QLora) or getattr(f.config.peft, "experts", False))
            and f.model_family.is_moe
            and f.config.memory.checkpointing is Checkpointing.off
        ),
        why=lambda f: (
            f"experts are {'dequantised' if isinstance(f.config.peft, QLora) else 'updated'} when "
            "their layer runs, and kept for the backward pass: "
            f"{format_bytes(_expert_bytes(f))} in all; recomputation keeps one layer's"
        ),
        fix=Fix("memory=checkpointing"),
        source="seen: bitsandbytes.nn.parametrize dequantises outside of autograd's own function",
        versions="bitsandbytes 0.50, torch 2.13",
    ),
)
