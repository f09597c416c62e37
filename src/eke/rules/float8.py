"""Rules about float8 products in linear layers (torchao)."""

import math
from importlib.util import find_spec

from eke.config.schema import Compute, Float8, PretrainedModel
from eke.rules.capability import capability_of, older_than
from eke.rules.rule import Facts, Rule, Verdict

FLOAT8_CAPABILITY = (8, 9)

ALIGNMENT = 16
"""Both sides of a weight: what `torch._scaled_mm` demands; other layers are left as they are."""

NARROW = 1024
"""Outputs up to which, at 4096 inputs or fewer, torchao measured no gain on an H100.
Source: torchao 0.18, float8_linear_utils._auto_filter_for_tensorwise."""

TORCHAO = "https://github.com/pytorch/ao/tree/main/torchao/float8"


def _is_float8(facts: Facts) -> bool:
    return facts.config.precision.float8 is not Float8.off


def _on_gpu(facts: Facts) -> bool:
    return _is_float8(facts) and facts.device.kind == "cuda"


def _without(facts: Facts) -> str:
    """The override that takes float8 back."""
    return "precision=bf16" if facts.config.precision.option == "fp8" else "precision.float8=off"


def _misaligned(facts: Facts, key: str) -> bool:
    size: int = getattr(facts.config.model, key)
    return _is_float8(facts) and size % ALIGNMENT != 0


def _align(facts: Facts, key: str, unit: int = ALIGNMENT) -> str:
    """The next aligned size; a checkpoint has the sizes it has."""
    if isinstance(facts.config.model, PretrainedModel):
        return _without(facts)
    size: int = getattr(facts.config.model, key)
    return f"model.{key}={-(-size // unit) * unit}"


def _heads(facts: Facts) -> int:
    return max(1, facts.config.model.num_attention_heads)


RULES = (
    Rule(
        id="float8_needs_torchao",
        verdict=Verdict.impossible,
        path="precision.float8",
        when=lambda f: not f.planning and _is_float8(f) and find_spec("torchao") is None,
        value=lambda f: f.config.precision.float8.value,
        why=lambda f: "needs the package torchao, which is not installed",
        fix=lambda f: f'{_without(f)}   (or: pip install "eke[torchao]")',
        source="pyproject.toml",
    ),
    Rule(
        id="float8_needs_ada",
        verdict=Verdict.impossible,
        path="precision.float8",
        when=lambda f: _is_float8(f) and older_than(f, FLOAT8_CAPABILITY),
        value=lambda f: f.config.precision.float8.value,
        why=lambda f: (
            f"float8 matrix units need CUDA compute capability 8.9 or newer; {capability_of(f)}"
        ),
        fix=_without,
        source=TORCHAO,
    ),
    Rule(
        id="rowwise_needs_bf16",
        verdict=Verdict.impossible,
        path="precision.compute",
        when=lambda f: (
            _on_gpu(f)
            and f.config.precision.float8 is Float8.rowwise
            and f.config.precision.compute is not Compute.bfloat16
        ),
        value=lambda f: f.config.precision.compute.value,
        why=lambda f: (
            "torchao rounds the products of factors with a scale per row to bfloat16, whatever the "
            "kernels could give"
        ),
        fix=lambda f: "precision.compute=bfloat16",
        source=f"{TORCHAO} (float8_ops.addmm_float8_unwrapped)",
        versions="torchao 0.18",
    ),
    Rule(
        id="gpt2_has_no_linear_layers",
        verdict=Verdict.impossible,
        path="precision.float8",
        when=lambda f: _is_float8(f) and f.config.model.family == "gpt2",
        value=lambda f: f.config.precision.float8.value,
        why=lambda f: (
            "torchao converts nn.Linear, and transformers' GPT-2 is made of Conv1D: not one of "
            "its layers would multiply in float8"
        ),
        fix=_without,
        source="transformers 5.23, models/gpt2/modeling_gpt2.py",
    ),
    Rule(
        id="float8_width_is_aligned",
        verdict=Verdict.impossible,
        path="model.hidden_size",
        when=lambda f: f.config.model.family != "gpt2" and _misaligned(f, "hidden_size"),
        value=lambda f: f.config.model.hidden_size,
        why=lambda f: (
            f"must be a multiple of {ALIGNMENT} for float8: every linear layer has this side, and "
            "none would be converted"
        ),
        # Heads of an even width divide it then, as rotary positions want.
        fix=lambda f: _align(f, "hidden_size", math.lcm(ALIGNMENT, 2 * _heads(f))),
        source=TORCHAO,
    ),
    Rule(
        id="float8_feed_forward_is_aligned",
        verdict=Verdict.no_effect,
        path="model.intermediate_size",
        when=lambda f: f.config.model.family != "gpt2" and _misaligned(f, "intermediate_size"),
        value=lambda f: f.config.model.intermediate_size,
        why=lambda f: (
            f"is no multiple of {ALIGNMENT}: the feed-forward layers do not multiply in float8"
        ),
        fix=lambda f: _align(f, "intermediate_size"),
        source=TORCHAO,
    ),
    Rule(
        id="float8_is_emulated",
        verdict=Verdict.no_benefit,
        path="precision.float8",
        when=lambda f: _is_float8(f) and f.device.kind == "cpu",
        value=lambda f: f.config.precision.float8.value,
        why=lambda f: (
            "a CPU has no float8 products: operands are rounded as they would be, and multiplied "
            "wider; that shows the numerics and takes longer"
        ),
        fix=_without,
        source="torchao 0.18, Float8LinearConfig.emulate",
    ),
    Rule(
        id="float8_needs_compile",
        verdict=Verdict.no_benefit,
        path="compile",
        when=lambda f: _on_gpu(f) and f.config.compile.option != "inductor",
        value=lambda f: f.config.compile.option,
        why=lambda f: (
            "float8 saves time only where the compiler fuses scaling and rounding into the layers "
            "around them"
        ),
        fix=lambda f: "compile=inductor",
        source=TORCHAO,
    ),
    Rule(
        id="float8_in_narrow_layers",
        verdict=Verdict.no_benefit,
        path="precision.float8",
        when=lambda f: _on_gpu(f) and f.config.model.hidden_size <= NARROW,
        value=lambda f: f.config.precision.float8.value,
        why=lambda f: (
            f"layers with {NARROW} outputs or fewer gain nothing by float8 on an H100; "
            f"model.hidden_size = {f.config.model.hidden_size}"
        ),
        fix=_without,
        source="torchao 0.18, float8_linear_utils._auto_filter_for_tensorwise",
    ),
)
