"""Rules about attention. Limits of kernels are from PyTorch's sdp_utils.cpp unless noted."""

import functools
from collections.abc import Callable

from eke.common.errors import Fix
from eke.config.schema import Backend, Compute, Packing
from eke.models.checkpoints.architecture import class_attribute
from eke.models.sizes import is_ragged
from eke.rules.rule import (
    AMPERE,
    VOLTA,
    Rule,
    RuleInputs,
    instead_of,
    needs_capability,
    needs_compiler,
    older_than,
    without_effect,
)

_SDP = (
    "https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/transformers/cuda/"
    "sdp_utils.cpp"
)
_FLASH = "https://github.com/Dao-AILab/flash-attention#installation-and-features"

WIDEST_HEAD = {Backend.flash: 256, Backend.cudnn: 128}
"""Kernel -> largest supported head width. mem_efficient has no limit."""


def _pinned(facts: RuleInputs, *backends: Backend) -> bool:
    attention = facts.config.attention
    return attention.option == "sdpa" and attention.backend in backends


def _flash_package(facts: RuleInputs) -> bool:
    return facts.config.attention.option in ("flash2", "flash3")


def _flex(facts: RuleInputs) -> bool:
    return facts.config.attention.option == "flex"


def _in_float32(facts: RuleInputs) -> bool:
    return facts.config.precision.compute is Compute.float32


def _dropout(facts: RuleInputs) -> float:
    return facts.config.model.dropout or 0.0


def _head_width(facts: RuleInputs) -> int:
    """Return the width of an attention head, 0 if unknown."""
    model = facts.config.model
    heads = model.num_attention_heads
    return getattr(model, "head_dim", None) or (model.hidden_size // heads if heads else 0)


def _widest(facts: RuleInputs) -> int:
    major, _ = facts.device.capability or (0, 0)
    # cuDNN's limit on 9.0 and 10.x, from cuDNN 9.22 on.
    return 256 if major in (9, 10) else WIDEST_HEAD[facts.config.attention.backend]


def _head_multiple(facts: RuleInputs) -> int:
    """Return the required divisor of the head width, 1 for flash, which pads."""
    if _pinned(facts, Backend.cudnn):
        return 8
    if not _pinned(facts, Backend.mem_efficient):
        return 1
    if not _in_float32(facts):
        return 1 if older_than(facts, VOLTA) else 8
    return 1 if older_than(facts, AMPERE) else 4


def _has_mask(facts: RuleInputs) -> bool:
    """Return whether attention needs a mask: for visible padding or packed samples."""
    data, ragged = facts.data, is_ragged(facts.config)
    if facts.model_family.is_decoder or data.packing is not Packing.off:
        return data.packing is not Packing.off and ragged
    return ragged or (data.pad_to_multiple_of or 1) > 1


def _option(facts: RuleInputs) -> str:
    return facts.config.attention.option


_MEM_EFFICIENT = Fix("attention.backend=mem_efficient")
_SDPA = Fix("attention=sdpa")

_SUPPORT = {
    "sdpa": "supports_sdpa",
    "flash2": "supports_flash_attn",
    "flash3": "supports_flash_attn",
    "flex": "supports_flex_attn",
}
"""Option -> field of `PretrainedModel`: whether transformers' class supports the option."""


def _implemented(facts: RuleInputs, option: str) -> bool:
    return getattr(facts.config.model, _SUPPORT.get(option, ""), None) is not False


_attention_rule = functools.partial(Rule, key="attention")


def _class_rule(what: str, name: str, is_chosen: Callable[[RuleInputs], bool]) -> Rule:
    """Return the rule that a known family has a kernel. Checkpoints: see `_implemented`."""

    def lacks_it(facts: RuleInputs) -> bool:
        family, task = facts.model_family, facts.config.task.option
        return family.is_known and class_attribute(family.name, task, f"_supports_{name}") is False

    return _attention_rule(
        when=lambda f: is_chosen(f) and lacks_it(f),
        why=lambda f: f"transformers does not support {what} for {f.model_family.name}",
        source=f"transformers' PreTrainedModel._supports_{name}",
        versions="transformers 5.17 to 5.23",
    )


_backend_rule = functools.partial(Rule, key="attention.backend", source=_SDP)

RULES = dict(
    backend_is_sdpas=without_effect(
        key="attention.backend",
        when=lambda f: f.config.attention.option != "sdpa",
        why=lambda f: f"selects a kernel of attention=sdpa. This run uses attention={_option(f)}",
        source="https://docs.pytorch.org/docs/stable/generated/torch.nn.attention.sdpa_kernel.html",
    ),
    backend_needs_cuda=_backend_rule(
        when=lambda f: _pinned(f, Backend.mem_efficient, Backend.cudnn) and f.on_cpu,
        why=lambda f: f"needs CUDA. {f.device.name} is a CPU, which supports flash and math",
    ),
    cpu_flash_has_no_dropout=Rule(
        key="attention.backend",
        when=lambda f: _pinned(f, Backend.flash) and f.on_cpu and _dropout(f) > 0,
        why=lambda f: f"the CPU flash kernel has no dropout. model.dropout is {_dropout(f):g}",
        fix=Fix("model.dropout=0"),
        source=_SDP.replace("cuda/sdp_utils.cpp", "sdp_utils_cpp.cpp"),
    ),
    learnt_bias_needs_gradient=_backend_rule(
        when=lambda f: (
            _pinned(f, Backend.flash, Backend.cudnn)
            and f.model_family.has_score_bias
            and not (f.on_cpu and _pinned(f, Backend.cudnn))
        ),
        why="this kernel has no gradient for T5's learned attention bias",
    ),
    flash_takes_no_mask=_backend_rule(
        when=lambda f: (
            _pinned(f, Backend.flash)
            and f.on_cuda
            and _has_mask(f)
            and not f.model_family.has_score_bias
        ),
        why="the CUDA flash kernel takes no mask. Padding and packed samples need one",
        fix=_MEM_EFFICIENT,
    ),
    kernel_needs_ampere=_backend_rule(
        when=lambda f: _pinned(f, Backend.flash, Backend.cudnn) and older_than(f, AMPERE),
        why=needs_capability("needs", AMPERE),
        fix=_MEM_EFFICIENT,
    ),
    kernel_needs_16_bits=_backend_rule(
        when=lambda f: _pinned(f, Backend.flash, Backend.cudnn) and f.on_cuda and _in_float32(f),
        why="this kernel needs 16-bit inputs. precision.compute is float32",
        fix=_MEM_EFFICIENT,
    ),
    kernel_head_is_narrow=_backend_rule(
        when=lambda f: (
            _pinned(f, Backend.flash, Backend.cudnn) and f.on_cuda and _head_width(f) > _widest(f)
        ),
        why=lambda f: f"supports head widths up to {_widest(f)}. This model's is {_head_width(f)}",
    ),
    kernel_head_is_aligned=_backend_rule(
        when=lambda f: f.on_cuda and _head_width(f) % _head_multiple(f) != 0,
        why=lambda f: (
            f"the head width must be a multiple of {_head_multiple(f)}. It is {_head_width(f)}"
        ),
    ),
    cudnn_dropout_in_sixteenths=Rule(
        key="attention.backend",
        when=lambda f: (
            _pinned(f, Backend.cudnn) and f.on_cuda and not (_dropout(f) * 16).is_integer()
        ),
        why=lambda f: f"cuDNN needs a multiple of 1/16. model.dropout is {_dropout(f):g}",
        source="https://github.com/pytorch/pytorch/pull/174245",
        versions="torch 2.13 (2.11 does not check, and some of cuDNN's kernels round)",
    ),
    attention_is_implemented=_attention_rule(
        when=lambda f: not _implemented(f, _option(f)),
        why=lambda f: (
            f"transformers does not support it for {getattr(f.config.model, 'model_type', '')} "
            f"and task={f.config.task.option}"
        ),
        fix=lambda f: _SDPA if _implemented(f, "sdpa") else Fix("attention=eager"),
        source="transformers' PreTrainedModel._supports_sdpa, _supports_flash_attn, "
        "_supports_flex_attn",
        versions="transformers 5.17 to 5.23",
    ),
    flash_package_needs_ampere=_attention_rule(
        when=lambda f: _flash_package(f) and (not f.on_cuda or older_than(f, AMPERE)),
        why=needs_capability("FlashAttention needs", AMPERE),
        source=_FLASH,
    ),
    flash_package_needs_16_bits=_attention_rule(
        when=lambda f: _flash_package(f) and _in_float32(f),
        why="FlashAttention needs 16-bit inputs. precision.compute is float32",
        fix=instead_of(("fp32", "tf32"), "precision=bf16", "precision.compute=bfloat16"),
        source=_FLASH,
    ),
    flash_package_without_t5=_class_rule("FlashAttention", "flash_attn", _flash_package),
    flash3_has_no_dropout=_attention_rule(
        when=lambda f: _option(f) == "flash3" and _dropout(f) > 0,
        why=lambda f: f"FlashAttention-3 has no dropout. model.dropout is {_dropout(f):g}",
        fix=Fix("model.dropout=0"),
        source="transformers' PreTrainedModel._flash_attn_can_dispatch",
        versions="transformers 5.23",
    ),
    flash_package_packs_one_row=Rule(
        key="data.packing",
        when=lambda f: (
            _flash_package(f)
            and f.data.packing is Packing.on
            and is_ragged(f.config)
            and max(f.config.batch.micro_batch, f.config.batch.eval_per_device or 0) > 1
        ),
        why=lambda f: (
            "transformers separates packed samples for FlashAttention only in batches of one row. "
            f"This batch has {f.config.batch.micro_batch}"
        ),
        fix=Fix("data.packing=padding_free"),
        source="transformers' modeling_flash_attention_utils._is_packed_sequence",
        versions="transformers 5.17 to 5.23",
    ),
    flex_needs_volta=_attention_rule(
        when=lambda f: _flex(f) and (not f.on_cuda or older_than(f, VOLTA)),
        why=needs_capability("FlexAttention trains only on GPUs. Its Triton kernels need", VOLTA),
        source="https://docs.pytorch.org/docs/stable/nn.attention.flex_attention.html",
        versions="torch 2.11 to 2.13",
    ),
    flex_needs_compiler=needs_compiler(
        "attention",
        lambda f: _flex(f) and f.on_cuda,
        _SDPA,
        "triton/runtime/build.py",
    ),
    flex_without_gpt2=_class_rule("FlexAttention", "flex_attn", _flex),
    flex_has_no_dropout=_attention_rule(
        when=lambda f: _flex(f) and _dropout(f) > 0,
        why=lambda f: f"FlexAttention has no dropout. model.dropout is {_dropout(f):g}",
        fix=Fix("model.dropout=0"),
        source="transformers' integrations/flex_attention.py",
        versions="transformers 5.17 to 5.23",
    ),
)
