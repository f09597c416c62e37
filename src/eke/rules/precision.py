"""Rules about number formats, float8 products (torchao), and sizes that tensor cores like."""

import math
from importlib.util import find_spec

from eke.common.errors import Fix
from eke.common.text import format_value
from eke.config.schema import (
    Adapters,
    BaseWeights,
    Casts,
    Compute,
    Config,
    Evaluation,
    Float8,
    Lora,
    PretrainedModel,
    SequenceClassification,
    Switch,
    TrainedBias,
    Weights,
)
from eke.models.families import is_classification
from eke.models.sizes import computed_formats, decide_formats, optimizer_entry
from eke.rules.rule import (
    ADA,
    AMPERE,
    VOLTA,
    Facts,
    Rule,
    instead_of,
    needs_capability,
    older_than,
    unsafe,
    without_benefit,
    without_effect,
)

SMALLEST_STEP = 2.0**-9
"""Of a weight near 1, in bfloat16: half of the distance to the next number below it."""

NO_WAY_FROM_BF16 = "autocast does not widen it to float32, and float16 cannot hold its range"


def _evaluates_in(facts: Facts, compute: Compute) -> bool:
    return facts.config.precision.evaluation.value == compute.value


def _is_float8(facts: Facts) -> bool:
    return facts.config.precision.float8 is not Float8.off


def is_narrow(facts: Facts) -> bool:
    """Whether the weights themselves have 16 bits."""
    return facts.config.precision.weights is Weights.bfloat16


def _trains_adapters_alone(config: Config) -> bool:
    """Adapters are float32; a classifier's head and biases have the format of the weights."""
    peft = config.peft
    biases = isinstance(peft, Lora) and peft.bias is not TrainedBias.none
    return isinstance(peft, Adapters) and not biases and not is_classification(config)


def _loses_updates(facts: Facts) -> bool:
    config = facts.config
    return (
        is_narrow(facts)
        and not _trains_adapters_alone(config)
        and not decide_formats(config).master
        and not optimizer_entry(config.optimizer).rounds_at_random
        and config.optimizer.lr < SMALLEST_STEP
    )


def _frozen_differ(facts: Facts) -> bool:
    """Whether frozen weights have a format that something cannot compute with."""
    peft = facts.config.peft
    if not isinstance(peft, Adapters) or peft.base_weights is BaseWeights.auto:
        return False
    if peft.base_weights is BaseWeights.float32:
        return is_narrow(facts)
    return computed_formats(facts.config) != {peft.base_weights.value}


def _model_type(facts: Facts) -> str:
    model = facts.config.model
    return model.model_type if isinstance(model, PretrainedModel) else ""


ALIGNMENT = 16
"""Both sides of a weight: what `torch._scaled_mm` demands; other layers are left as they are."""

NARROW = 1024
"""Outputs up to which, at 4096 inputs or fewer, torchao measured no gain on an H100.
Source: torchao 0.18, float8_linear_utils._auto_filter_for_tensorwise."""

TORCHAO = "https://github.com/pytorch/ao/tree/main/torchao/float8"


def _on_gpu(facts: Facts) -> bool:
    return _is_float8(facts) and facts.on_cuda


_without = instead_of(("fp8",), "precision=bf16", "precision.float8=off")
"""The override that takes float8 back."""


def _misaligned(facts: Facts, key: str) -> bool:
    """Whether linear layers with this side are not converted; GPT-2 has none."""
    converts = _is_float8(facts) and not facts.model_family.stores_transposed
    return converts and getattr(facts.config.model, key) % ALIGNMENT != 0


def _next_size(facts: Facts, key: str, unit: int) -> Fix:
    """The next multiple; of a width also one that its heads divide, into even widths."""
    if key == "hidden_size":
        unit = math.lcm(unit, 2 * max(1, facts.config.model.num_attention_heads))
    return Fix(f"model.{key}={_up(getattr(facts.config.model, key), unit)}")


def _align(facts: Facts, key: str) -> Fix:
    """The next aligned size; a checkpoint has the sizes it has."""
    if isinstance(facts.config.model, PretrainedModel):
        return _without(facts)
    return _next_size(facts, key, ALIGNMENT)


NVIDIA = (
    "https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/"
    "index.html#requirements-tc"
)


def _unit(facts: Facts) -> tuple[int, str]:
    """Best divisor of each side of a product, and the format; 1 where no tensor cores run."""
    # cuBLAS 11 uses them for any size, at best with multiples of 16 bytes, on an A100 of 128.
    if not facts.on_cuda or older_than(facts, VOLTA):
        return 1, ""
    precision, is_a100 = facts.config.precision, facts.device.capability == AMPERE
    if precision.compute is not Compute.float32:
        return 64 if is_a100 else 8, precision.compute.value
    if precision.tf32 is Switch.on:
        return 32 if is_a100 else 4, "TF32"
    return 1, ""


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _model_rule(key: str, what: str) -> Rule:
    """A side of the model's weights; a checkpoint has the sides it has."""
    return without_benefit(
        id=f"tensor_cores_like_{key}",
        key=f"model.{key}",
        when=lambda f: (
            not isinstance(f.config.model, PretrainedModel)
            and getattr(f.config.model, key) % _unit(f)[0] != 0
            # Of a classifier the vocabulary is only looked up.
            and not (key == "vocab_size" and isinstance(f.config.task, SequenceClassification))
        ),
        why=lambda f: f"{_why(f)} {what}",
        fix=lambda f: _next_size(f, key, _unit(f)[0]),
        source=NVIDIA,
    )


def _why(facts: Facts) -> str:
    divisor, name = _unit(facts)
    return f"{facts.device.name} is fastest in {name} with multiples of {divisor};"


def _tokens(facts: Facts) -> int:
    return facts.config.batch.micro_batch * facts.data.seq_len


def _batch_fix(facts: Facts) -> Fix:
    """The nearest smaller batch that is aligned, or the smallest one there is."""
    config, (divisor, _) = facts.config, _unit(facts)
    step = divisor // math.gcd(divisor, config.data.seq_len)
    good = max(step, config.batch.micro_batch // step * step)
    target, together = config.batch.target, good * config.distributed.num_processes
    if target is not None and target % together:
        return Fix(f"batch.per_device={good}", f"batch.target={_up(target, together)}")
    return Fix(f"batch.per_device={good}")


RULES = (
    Rule(
        id="tf32_needs_ampere",
        key="precision",
        when=lambda f: f.config.precision.tf32 is Switch.on and (f.on_cpu or older_than(f, AMPERE)),
        why=needs_capability("TF32 needs", AMPERE),
        fix=instead_of(("tf32",), "precision=fp32", "precision.tf32=auto"),
        source="https://docs.pytorch.org/docs/stable/notes/cuda.html#tf32-on-ampere",
    ),
    Rule(
        id="bf16_needs_ampere",
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
    Rule(
        id="narrow_weights_need_their_compute",
        key="precision.compute",
        when=lambda f: is_narrow(f) and f.config.precision.compute is not Compute.bfloat16,
        why=f"precision.weights is bfloat16: {NO_WAY_FROM_BF16}",
        fix=Fix("precision.compute=bfloat16"),
        source="https://docs.pytorch.org/docs/stable/amp.html",
    ),
    Rule(
        id="frozen_weights_have_the_computed_format",
        key="peft.base_weights",
        when=_frozen_differ,
        why=lambda f: (
            f"products are computed in {' and '.join(sorted(computed_formats(f.config)))}, and "
            f"trained weights are {f.config.precision.weights.value}: autocast narrows weights, "
            "and does not widen them"
        ),
        fix=Fix("peft.base_weights=auto"),
        source="https://docs.pytorch.org/docs/stable/amp.html",
    ),
    without_effect(
        id="master_needs_narrow_weights",
        key="precision.master",
        when=lambda f: f.config.precision.master is Switch.on and not is_narrow(f),
        why="the weights are float32 themselves",
        fix=Fix("precision.master=auto"),
        source="training/model/number_formats.py",
    ),
    without_effect(
        id="casts_need_wide_weights",
        key="precision.casts",
        when=lambda f: (
            f.config.precision.casts is Casts.per_step and not decide_formats(f.config).copies
        ),
        why=lambda f: (
            f"weights are {f.config.precision.weights.value}, as what is computed in: none is cast"
        ),
        fix=Fix("precision.casts=per_use"),
        source="training/model/number_formats.py",
    ),
    Rule(
        id="casts_are_of_one_process",
        key="precision.casts",
        when=lambda f: (
            decide_formats(f.config).copies
            and f.distributed.option != "none"
            and not decide_formats(f.config).gathered
        ),
        why=lambda f: (
            "distributed=fsdp would send all weights in 16 bits, and precision.evaluation, "
            "precision.float8 or peft=dora needs them in float32"
            if f.distributed.option == "fsdp"
            else f"distributed={f.distributed.option} exchanges the weights' own gradients, "
            "and would not see those of copies"
        ),
        fix=Fix("precision.casts=per_use"),
        source="training/model/number_formats.py",
    ),
    unsafe(
        id="small_updates_are_lost",
        key="precision.weights",
        when=_loses_updates,
        why=lambda f: (
            "bfloat16 rounds away what changes a weight by less than 2^-9 of it: at optimizer.lr = "
            f"{f.config.optimizer.lr:g}, below {SMALLEST_STEP:.2g}, normalisation weights (near 1) "
            "stay where they are, and others learn late or never"
        ),
        fix=Fix("precision.master=on"),
        source="Zamirai et al. 2020, arXiv:2010.06192",
    ),
    Rule(
        id="evaluation_has_its_own_format",
        key="precision.evaluation",
        when=lambda f: (
            f.config.precision.evaluation is not Evaluation.same
            and (_is_float8(f) or (is_narrow(f) and not _evaluates_in(f, Compute.bfloat16)))
        ),
        why=lambda f: (
            "float8 layers multiply in float8 in evaluation, too"
            if _is_float8(f)
            else f"precision.weights is bfloat16: {NO_WAY_FROM_BF16}"
        ),
        fix=Fix("precision.evaluation=same"),
        source="training/model/number_formats.py: evaluation has its own autocast, but no weights",
    ),
    unsafe(
        id="t5_overflows_float16",
        key="precision",
        when=lambda f: (
            _model_type(f).endswith("t5")  # mT5, UMT5, LongT5: the same layers
            and (f.config.precision.compute is Compute.float16 or _evaluates_in(f, Compute.float16))
        ),
        why=lambda f: (
            f"{_model_type(f)}'s checkpoints were trained in bfloat16: their "
            "activations exceed 65504, float16's largest number"
        ),
        fix=lambda f: (
            Fix("precision.evaluation=same")
            if f.config.precision.compute is not Compute.float16
            else instead_of(("fp16",), "precision=bf16", "precision.compute=bfloat16")(f)
        ),
        source="https://huggingface.co/docs/transformers/perf_train_gpu_one (bf16)",
    ),
    Rule(
        id="float8_needs_torchao",
        key="precision.float8",
        when=lambda f: not f.planning and _is_float8(f) and find_spec("torchao") is None,
        why="needs the package torchao, which is not installed",
        fix=lambda f: Fix(*_without(f).words, remark='or: pip install "eke[torchao]"'),
        source="pyproject.toml",
    ),
    Rule(
        id="float8_needs_ada",
        key="precision.float8",
        when=lambda f: _is_float8(f) and older_than(f, ADA),
        why=needs_capability("float8 matrix units need", ADA),
        fix=_without,
        source=TORCHAO,
    ),
    Rule(
        id="rowwise_needs_bf16",
        key="precision.compute",
        when=lambda f: (
            _on_gpu(f)
            and f.config.precision.float8 is Float8.rowwise
            and f.config.precision.compute is not Compute.bfloat16
        ),
        why="torchao rounds the products of factors with a scale per row to bfloat16, whatever the "
        "kernels could give",
        fix=Fix("precision.compute=bfloat16"),
        source=f"{TORCHAO} (float8_ops.addmm_float8_unwrapped)",
        versions="torchao 0.18",
    ),
    Rule(
        id="gpt2_has_no_linear_layers",
        key="precision.float8",
        when=lambda f: _is_float8(f) and f.model_family.stores_transposed,
        why="torchao converts nn.Linear, and transformers' GPT-2 is made of Conv1D: not one of "
        "its layers would multiply in float8",
        fix=_without,
        source="transformers 5.23, models/gpt2/modeling_gpt2.py",
    ),
    Rule(
        id="float8_width_is_aligned",
        key="model.hidden_size",
        when=lambda f: _misaligned(f, "hidden_size"),
        why=f"must be a multiple of {ALIGNMENT} for float8: every linear layer has this side, and "
        "none would be converted",
        fix=lambda f: _align(f, "hidden_size"),
        source=TORCHAO,
    ),
    without_effect(
        id="float8_feed_forward_is_aligned",
        key="model.intermediate_size",
        when=lambda f: _misaligned(f, "intermediate_size"),
        why=f"is no multiple of {ALIGNMENT}: the feed-forward layers do not multiply in float8",
        fix=lambda f: _align(f, "intermediate_size"),
        source=TORCHAO,
    ),
    without_benefit(
        id="float8_is_emulated",
        key="precision.float8",
        when=lambda f: _is_float8(f) and f.on_cpu,
        why="a CPU has no float8 products: operands are rounded as they would be, and multiplied "
        "wider; that shows the numerics and takes longer",
        fix=_without,
        source="torchao 0.18, Float8LinearConfig.emulate",
    ),
    without_benefit(
        id="float8_needs_compile",
        key="compile",
        when=lambda f: _on_gpu(f) and f.config.compile.option != "inductor",
        why="float8 saves time only where the compiler fuses scaling and rounding into the layers "
        "around them",
        fix=Fix("compile=inductor"),
        source=TORCHAO,
    ),
    without_benefit(
        id="float8_in_narrow_layers",
        key="precision.float8",
        when=lambda f: _on_gpu(f) and f.config.model.hidden_size <= NARROW,
        why=lambda f: (
            f"layers with {NARROW} outputs or fewer gain nothing by float8 on an H100; "
            f"model.hidden_size = {f.config.model.hidden_size}"
        ),
        fix=_without,
        source="torchao 0.18, float8_linear_utils._auto_filter_for_tensorwise",
    ),
    _model_rule("vocab_size", "ids that nothing uses cost less than a crooked output layer"),
    _model_rule("hidden_size", "it is a side of every layer"),
    _model_rule("intermediate_size", "it is a side of every feed-forward layer"),
    without_benefit(
        id="tensor_cores_like_token_count",
        key="batch.per_device",
        when=lambda f: _tokens(f) % _unit(f)[0] != 0,
        value=lambda f: f.config.batch.micro_batch,
        why=lambda f: (
            f"{_why(f)} a micro-batch has {format_value(_tokens(f))} tokens "
            f"({f.config.batch.micro_batch} x data.seq_len {f.data.seq_len})"
        ),
        fix=_batch_fix,
        source=NVIDIA,
    ),
)
