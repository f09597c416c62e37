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
    Rule,
    RuleInputs,
    capability_of,
    needs_compiler,
    older_than,
    unsafe,
    without_effect,
)


def _library(facts: RuleInputs) -> str:
    return facts.optimizer.package.partition(".")[0]


def _shortest_side(facts: RuleInputs) -> int:
    """Return the shortest side of all matrices in Transformer layers, 0 without matrices."""
    weights = structure(facts.config).weights
    return min((min(w.shape) for w in weights if w.role is Role.hidden), default=0)


def _rank_limit(facts: RuleInputs) -> int:
    """Return the lowest rank whose states and projection save no memory over AdamW."""
    # AdamW stores 2 x long x short numbers of a matrix, a projection 2 x long x rank + rank x short
    weights = [w for w in structure(facts.config).weights if w.role is Role.hidden]
    return min(
        (-(-2 * max(w.shape) * min(w.shape) // (2 * max(w.shape) + min(w.shape))) for w in weights),
        default=0,
    )


def _trains_no_matrix(facts: RuleInputs) -> bool:
    """Return whether a known architecture trains only vectors, tables and heads."""
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
            "needs trained matrices in Transformer layers. "
            f"{'model.freeze' if f.config.model.freeze else 'peft=ia3'} leaves none"
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
        why=lambda f: f"{_library(f)} needs CUDA. {f.device.name} is a CPU",
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
        use=lambda f: f"{_library(f)} compiles its step. ",
    ),
    Rule(
        id="torchao_needs_volta",
        key="optimizer",
        when=lambda f: f.optimizer.compiles and older_than(f, VOLTA),
        why=lambda f: (
            f"{_library(f)} uses Triton, which needs CUDA compute capability 7.0 or newer. "
            f"{capability_of(f)}"
        ),
        fix=Fix("optimizer=adamw_8bit"),
        source="https://docs.pytorch.org/docs/stable/torch.compiler.html",
    ),
    without_effect(
        id="paging_needs_cuda",
        key="optimizer",
        when=lambda f: f.optimizer.pages and f.on_cpu,
        why="paging moves state between a GPU and its host. This run uses a CPU",
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
        why="float32 weights are stored without rounding",
        fix=Fix("optimizer=adamw"),
        source="torchao, optim/adam.py: bf16_stochastic_round and p.dtype is torch.bfloat16",
        versions="torchao 0.18",
    ),
    unsafe(
        id="schedule_free_has_no_schedule",
        key="schedule",
        when=lambda f: f.optimizer.averages and f.config.schedule.option != "constant",
        why=lambda f: (
            f"optimizer={f.config.optimizer.option} averages weights instead of decaying the "
            "learning rate. With both, the average lags behind"
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
            "tensors are not quantised: they have fewer than "
            f"{getattr(f.config.optimizer, 'min_8bit_size', 4096)} numbers, are embeddings, or "
            "have incomplete blocks"
        ),
        fix=lambda f: Fix(f"optimizer={f.optimizer.unquantised}"),
        source="bitsandbytes, optim/optimizer.py, init_state, and torchao, optim/adam.py",
        versions="bitsandbytes 0.50, torchao 0.18",
        sized=True,
    ),
    without_effect(
        id="rank_saves_nothing",
        key="optimizer.rank",
        when=lambda f: f.optimizer.projects and projection_rank(f.config) >= _rank_limit(f),
        value=lambda f: projection_rank(f.config),
        why=lambda f: (
            f"needs as much memory as AdamW for a matrix with shorter side {_shortest_side(f)}. "
            f"Ranks below {_rank_limit(f)} save memory"
        ),
        # A quarter of the shortest side, if that is a valid rank.
        fix=lambda f: Fix(
            f"optimizer.rank={rank}"
            if 0 < (rank := _shortest_side(f) // 4) < _rank_limit(f)
            else "optimizer=adamw"
        ),
        source="2 x long x rank + rank x short against 2 x long x short numbers",
        sized=True,
    ),
)


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


def _trains_biases(facts: RuleInputs) -> bool:
    lora = _lora(facts)
    return lora is not None and lora.bias is TrainedBias.lora_only


def _expert_bytes(facts: RuleInputs) -> int:
    """Return the bytes of all experts' weights, dequantised to the format of their products."""
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
            f"matches no linear layer of model={f.config.model.option}. Available: "
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
    unsafe(
        id="adapter_rank_saves_nothing",
        key="peft.r",
        when=lambda f: (lora := _lora(f)) and 0 < f.config.model.hidden_size <= 2 * lora.r,
        why=lambda f: (
            "adapters have at least as many numbers as the matrices of width "
            f"{f.config.model.hidden_size} (2 x r x width)"
        ),
        fix=lambda f: Fix(f"peft.r={max(1, f.config.model.hidden_size // 8)}"),
        source="arXiv:2106.09685, section 4.1",
    ),
    without_effect(
        id="rslora_needs_rank",
        key="peft.use_rslora",
        when=lambda f: (lora := _lora(f)) and lora.use_rslora and lora.r == 1,
        why="divides by the square root of peft.r, which is 1",
        fix=Fix("peft.use_rslora=false"),
        source="arXiv:2312.03732",
    ),
    without_effect(
        id="adapters_are_fused",
        key="peft.fused",
        when=lambda f: getattr(f.config.peft, "fused", False) and bool(why_not_fused(f.config)),
        why=lambda f: f"PEFT's own forward pass is used with {why_not_fused(f.config)}",
        fix=Fix("peft.fused=false"),
        source="eke.training.model.fused_adapters",
    ),
    without_effect(
        id="adapted_layers_have_biases",
        key="peft.bias",
        when=lambda f: _trains_biases(f) and not f.model_family.has_biases,
        why=lambda f: f"the linear layers of {f.model_family.name} have no biases",
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
            "bitsandbytes rounds trained biases of 4-bit layers to "
            f"{f.config.precision.compute.value} in the first forward pass"
        ),
        fix=Fix("peft.bias=none"),
        source="measured: Linear4bit.forward assigns bias.data",
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
            f"{'dequantised' if isinstance(f.config.peft, QLora) else 'updated'} experts of all "
            f"layers stay in memory until the backward pass: {format_bytes(_expert_bytes(f))}"
        ),
        fix=Fix("memory=checkpointing"),
        source="measured: bitsandbytes.nn.parametrize dequantises outside its autograd function",
        versions="bitsandbytes 0.50, torch 2.13",
    ),
)
