"""Rules about number formats, float8 products (torchao) and sizes for tensor cores."""

import math
from importlib.util import find_spec

from eke.common.errors import Fix
from eke.common.text import format_value
from eke.config.schema import (
    Adapters,
    AutoBool,
    BaseWeights,
    Compute,
    Config,
    Float8,
    Lora,
    PretrainedModel,
    SequenceClassification,
    TrainedBias,
    Weights,
)
from eke.models.sizes import computed_formats, decide_formats, optimizer_entry
from eke.rules.rule import (
    ADA,
    AMPERE,
    VOLTA,
    Rule,
    RuleInputs,
    if_changed,
    instead_of,
    needs_capability,
    older_than,
    unsafe,
    without_benefit,
    without_effect,
)

_SMALLEST_STEP = 2.0**-9
"""Half the distance in bfloat16 from 1 to the next smaller number."""

_NO_WAY_FROM_BF16 = "autocast does not widen it, and float16 has a smaller range"


def _evaluates_in(facts: RuleInputs, compute: Compute) -> bool:
    return facts.config.precision.evaluation.value == compute.value


def _is_float8(facts: RuleInputs) -> bool:
    return facts.config.precision.float8 is not Float8.off


def stores_bf16(facts: RuleInputs) -> bool:
    """Return whether the stored weights are bfloat16."""
    return facts.config.precision.weights is Weights.bfloat16


def _trains_only_adapters(config: Config) -> bool:
    """Return whether all trained weights are adapters, which are float32."""
    # A classifier's head and biases have the format of the weights.
    peft = config.peft
    biases = isinstance(peft, Lora) and peft.bias is not TrainedBias.none
    return isinstance(peft, Adapters) and not biases and config.targets.per_token


def _loses_updates(facts: RuleInputs) -> bool:
    config = facts.config
    return (
        stores_bf16(facts)
        and not _trains_only_adapters(config)
        and not decide_formats(config).master
        and not optimizer_entry(config.optimizer).stochastic_rounding
        and config.optimizer.lr < _SMALLEST_STEP
    )


def _frozen_differ(facts: RuleInputs) -> bool:
    """Return whether frozen weights have a format that some matrix products do not use."""
    peft = facts.config.peft
    if not isinstance(peft, Adapters) or peft.base_weights is BaseWeights.auto:
        return False
    if peft.base_weights is BaseWeights.float32:
        return stores_bf16(facts)
    return computed_formats(facts.config) != {peft.base_weights.value}


def _model_type(facts: RuleInputs) -> str:
    model = facts.config.model
    return model.model_type if isinstance(model, PretrainedModel) else ""


_ALIGNMENT = 16
"""Divisor of both sides of a weight required by `torch._scaled_mm`. Other layers are skipped."""

_NARROW = 1024
"""Number of outputs up to which torchao measured no gain on an H100 (at 4096 inputs or fewer).
Source: torchao 0.18, float8_linear_utils._auto_filter_for_tensorwise."""

_TORCHAO = "https://github.com/pytorch/ao/tree/main/torchao/float8"


def _on_gpu(facts: RuleInputs) -> bool:
    return _is_float8(facts) and facts.on_cuda


_without = instead_of(("fp8",), "precision=bf16", "precision.float8=off")


def _misaligned(facts: RuleInputs, key: str) -> bool:
    """Return whether this side prevents the conversion of linear layers. GPT-2 has none."""
    converts = _is_float8(facts) and not facts.model_family.stores_transposed
    return converts and getattr(facts.config.model, key) % _ALIGNMENT != 0


def _next_size(facts: RuleInputs, key: str, unit: int) -> Fix:
    """Return the next multiple of `unit`, for a width also a multiple of 2 x heads."""
    if key == "hidden_size":
        unit = math.lcm(unit, 2 * max(1, facts.config.model.num_attention_heads))
    return Fix(f"model.{key}={_round_up(getattr(facts.config.model, key), unit)}")


def _align(facts: RuleInputs, key: str) -> Fix:
    """Return the next aligned size, or turn off float8 for a checkpoint."""
    if isinstance(facts.config.model, PretrainedModel):
        return _without(facts)
    return _next_size(facts, key, _ALIGNMENT)


_NVIDIA = (
    "https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/"
    "index.html#requirements-tc"
)


def _unit(facts: RuleInputs) -> tuple[int, str]:
    """Return the best divisor of each side and the format, 1 and "" without tensor cores."""
    # cuBLAS 11 is fastest with multiples of 16 bytes, on an A100 of 128 bytes.
    if not facts.on_cuda or older_than(facts, VOLTA):
        return 1, ""
    precision, is_a100 = facts.config.precision, facts.device.capability == AMPERE
    if precision.compute is not Compute.float32:
        return 64 if is_a100 else 8, precision.compute.value
    if precision.tf32 is AutoBool.on:
        return 32 if is_a100 else 4, "TF32"
    return 1, ""


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _model_rule(key: str, what: str) -> Rule:
    """Return the rule for a side of the weights. The sides of checkpoints are fixed."""
    return without_benefit(
        key=f"model.{key}",
        when=lambda f: (
            not isinstance(f.config.model, PretrainedModel)
            and getattr(f.config.model, key) % _unit(f)[0] != 0
            # A classifier only looks up the vocabulary.
            and not (key == "vocab_size" and isinstance(f.config.task, SequenceClassification))
        ),
        why=lambda f: f"{_why(f)} {what}",
        fix=lambda f: _next_size(f, key, _unit(f)[0]),
        source=_NVIDIA,
    )


def _why(facts: RuleInputs) -> str:
    divisor, name = _unit(facts)
    return f"{facts.device.name} is fastest in {name} with multiples of {divisor}."


def _tokens(facts: RuleInputs) -> int:
    return facts.config.batch.micro_batch * facts.data.seq_len


def _batch_fix(facts: RuleInputs) -> Fix:
    """Return the nearest smaller aligned batch, or the smallest aligned batch."""
    config, (divisor, _) = facts.config, _unit(facts)
    step = divisor // math.gcd(divisor, config.data.seq_len)
    good = max(step, config.batch.micro_batch // step * step)
    target, together = config.batch.target, good * config.distributed.num_processes
    if target is not None and target % together:
        return Fix(f"batch.per_device={good}", f"batch.target={_round_up(target, together)}")
    return Fix(f"batch.per_device={good}")


RULES = dict(
    tf32_needs_ampere=Rule(
        key="precision",
        when=lambda f: (
            f.config.precision.tf32 is AutoBool.on and (f.on_cpu or older_than(f, AMPERE))
        ),
        why=needs_capability("TF32 needs", AMPERE),
        fix=instead_of(("tf32",), "precision=fp32", "precision.tf32=auto"),
        source="https://docs.pytorch.org/docs/stable/notes/cuda.html#tf32-on-ampere",
    ),
    bf16_needs_ampere=Rule(
        key="precision",
        when=lambda f: (
            (f.config.precision.compute is Compute.bfloat16 or _evaluates_in(f, Compute.bfloat16))
            and older_than(f, AMPERE)
        ),
        why=needs_capability("bfloat16 matrix units need", AMPERE),
        fix=lambda f: Fix(
            "precision=fp16"
            if f.config.precision.compute is Compute.bfloat16
            else "precision.evaluation=same"
        ),
        source="https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities",
    ),
    narrow_weights_need_their_compute=Rule(
        key="precision.compute",
        when=lambda f: stores_bf16(f) and f.config.precision.compute is not Compute.bfloat16,
        why=f"precision.weights is bfloat16. {_NO_WAY_FROM_BF16}",
        fix=Fix("precision.compute=bfloat16"),
        source="https://docs.pytorch.org/docs/stable/amp.html",
    ),
    frozen_weights_have_the_computed_format=Rule(
        key="peft.base_weights",
        when=_frozen_differ,
        why=lambda f: (
            f"products use {' and '.join(sorted(computed_formats(f.config)))}, trained weights "
            f"{f.config.precision.weights.value}. Autocast only narrows weights"
        ),
        source="https://docs.pytorch.org/docs/stable/amp.html",
    ),
    master_needs_narrow_weights=without_effect(
        key="precision.master",
        when=lambda f: f.config.precision.master is AutoBool.on and not stores_bf16(f),
        why="the weights are already float32",
        source="training/model/number_formats.py",
    ),
    casts_need_wide_weights=without_effect(
        key="precision.casts",
        when=lambda f: not decide_formats(f.config).copies,
        why=lambda f: f"weights and products both use {f.config.precision.weights.value}",
        source="training/model/number_formats.py",
    ),
    casts_are_of_one_process=Rule(
        key="precision.casts",
        when=lambda f: (
            decide_formats(f.config).copies
            and f.distributed.option != "none"
            and not decide_formats(f.config).gathered
        ),
        why=lambda f: (
            "distributed=fsdp would gather 16-bit weights. precision.evaluation, "
            "precision.float8 or peft=dora needs float32"
            if f.distributed.option == "fsdp"
            else f"distributed={f.distributed.option} does not exchange gradients of weight copies"
        ),
        source="training/model/number_formats.py",
    ),
    small_updates_are_lost=unsafe(
        key="precision.weights",
        when=_loses_updates,
        why=lambda f: (
            "bfloat16 rounds away updates below 2^-9 of a weight. optimizer.lr = "
            f"{f.config.optimizer.lr:g} is below {_SMALLEST_STEP:.2g}: normalisation weights "
            "(near 1) do not change"
        ),
        fix=Fix("precision.master=on"),
        source="Zamirai et al. 2020, arXiv:2010.06192",
    ),
    evaluation_has_its_own_format=if_changed(
        key="precision.evaluation",
        when=lambda f: _is_float8(f) or (stores_bf16(f) and not _evaluates_in(f, Compute.bfloat16)),
        why=lambda f: (
            "float8 layers also use float8 in evaluation"
            if _is_float8(f)
            else f"precision.weights is bfloat16. {_NO_WAY_FROM_BF16}"
        ),
        source="training/model/number_formats.py: evaluation uses its own autocast, not weights",
    ),
    t5_overflows_float16=unsafe(
        key="precision",
        when=lambda f: (
            _model_type(f).endswith("t5")  # mT5, UMT5, LongT5: the same layers
            and (f.config.precision.compute is Compute.float16 or _evaluates_in(f, Compute.float16))
        ),
        why=lambda f: (
            f"{_model_type(f)} was trained in bfloat16. Its activations exceed 65504, the float16 "
            "maximum"
        ),
        fix=lambda f: (
            Fix("precision.evaluation=same")
            if f.config.precision.compute is not Compute.float16
            else instead_of(("fp16",), "precision=bf16", "precision.compute=bfloat16")(f)
        ),
        source="https://huggingface.co/docs/transformers/perf_train_gpu_one (bf16)",
    ),
    float8_needs_torchao=Rule(
        key="precision.float8",
        when=lambda f: not f.planning and _is_float8(f) and find_spec("torchao") is None,
        why="the package torchao is not installed",
        fix=lambda f: Fix(*_without(f).words, remark='or: pip install "eke[torchao]"'),
        source="pyproject.toml",
    ),
    float8_needs_ada=Rule(
        key="precision.float8",
        when=lambda f: _is_float8(f) and older_than(f, ADA),
        why=needs_capability("float8 matrix units need", ADA),
        fix=_without,
        source=_TORCHAO,
    ),
    rowwise_needs_bf16=Rule(
        key="precision.compute",
        when=lambda f: (
            _on_gpu(f)
            and f.config.precision.float8 is Float8.rowwise
            and f.config.precision.compute is not Compute.bfloat16
        ),
        why="torchao rounds row-wise scaled products to bfloat16",
        fix=Fix("precision.compute=bfloat16"),
        source=f"{_TORCHAO} (float8_ops.addmm_float8_unwrapped)",
        versions="torchao 0.18",
    ),
    gpt2_has_no_linear_layers=Rule(
        key="precision.float8",
        when=lambda f: _is_float8(f) and f.model_family.stores_transposed,
        why="torchao converts nn.Linear. transformers' GPT-2 uses only Conv1D",
        fix=_without,
        source="transformers 5.23, models/gpt2/modeling_gpt2.py",
    ),
    float8_width_is_aligned=Rule(
        key="model.hidden_size",
        when=lambda f: _misaligned(f, "hidden_size"),
        why=f"must be a multiple of {_ALIGNMENT} for float8. No linear layer would be converted",
        fix=lambda f: _align(f, "hidden_size"),
        source=_TORCHAO,
    ),
    float8_feed_forward_is_aligned=without_effect(
        key="model.intermediate_size",
        when=lambda f: _misaligned(f, "intermediate_size"),
        why=f"is no multiple of {_ALIGNMENT}. The feed-forward layers do not use float8",
        fix=lambda f: _align(f, "intermediate_size"),
        source=_TORCHAO,
    ),
    float8_is_emulated=without_benefit(
        key="precision.float8",
        when=lambda f: _is_float8(f) and f.on_cpu,
        why="a CPU emulates float8 products, which shows the numerics but takes longer",
        fix=_without,
        source="torchao 0.18, Float8LinearConfig.emulate",
    ),
    float8_needs_compile=without_benefit(
        key="compile",
        when=lambda f: _on_gpu(f) and f.config.compile.option != "inductor",
        why="float8 saves time only if inductor fuses scaling and rounding",
        fix=Fix("compile=inductor"),
        source=_TORCHAO,
    ),
    float8_in_narrow_layers=without_benefit(
        key="precision.float8",
        when=lambda f: _on_gpu(f) and 0 < f.config.model.hidden_size <= _NARROW,
        why=lambda f: (
            f"layers with up to {_NARROW} outputs gain no speed from float8 on an H100. "
            f"model.hidden_size = {f.config.model.hidden_size}"
        ),
        fix=_without,
        source="torchao 0.18, float8_linear_utils._auto_filter_for_tensorwise",
    ),
    tensor_cores_like_vocab_size=_model_rule(
        "vocab_size", "Padding the vocabulary is cheaper than a misaligned output layer"
    ),
    tensor_cores_like_hidden_size=_model_rule("hidden_size", "It is a side of every layer"),
    tensor_cores_like_intermediate_size=_model_rule(
        "intermediate_size", "It is a side of every feed-forward layer"
    ),
    tensor_cores_like_token_count=without_benefit(
        key="batch.per_device",
        when=lambda f: _tokens(f) % _unit(f)[0] != 0,
        value=lambda f: f.config.batch.micro_batch,
        why=lambda f: (
            f"{_why(f)} A micro-batch has {format_value(_tokens(f))} tokens "
            f"({f.config.batch.micro_batch} x data.seq_len {f.data.seq_len})"
        ),
        fix=_batch_fix,
        source=_NVIDIA,
    ),
)
