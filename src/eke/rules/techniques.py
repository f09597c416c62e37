"""Table of techniques: savings, costs, requirements, and effect on the numerics."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import partial
from typing import Any

from eke.config.schema import (
    FSDP,
    Adafactor,
    AdamW8bit,
    AutoBool,
    Backend,
    Checkpointing,
    Compute,
    Config,
    Float8,
    Lora,
    MaskedLM,
    QLora,
    TorchAdamW,
    Weights,
)
from eke.models.sizes import STAGE, optimizer_entry

CPU, CUDA = "cpu", "cuda"


class Numerics(Enum):
    """Change of the arithmetic by a technique."""

    same = "same"
    """Same results except for the order of sums."""
    mixed = "mixed"
    """Other rounding of products: 16 bits or TF32 over float32 weights and optimizer states."""
    reduced = "reduced"
    """Other training: narrower weights or states, another optimizer, or fewer trained weights."""

    @property
    def includes(self) -> tuple["Numerics", ...]:
        """Classes permitted with this one."""
        every = tuple(Numerics)
        return every[: every.index(self) + 1]


_GUIDE = "https://huggingface.co/docs/transformers/v4.20.1/en/perf_train_gpu_one"
_TORCHAO = "https://github.com/pytorch/ao/tree/main/torchao/optim"
_TORCHTITAN = (
    "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
)


@dataclass(frozen=True)
class Published:
    """Measured step time with a technique, divided by the step time without."""

    slowdown: float
    source: str
    """Measurement, setup and source, as a clause."""


def _on_a_v100(speed: float) -> Published:
    """Return a row of the guides' table: BERT-large, 512 x 512, baseline 8.86 samples/s."""
    return Published(8.86 / speed, f"8.86 to {speed} samples/s on a V100, {_GUIDE}")


QUARTER_BATCH = _on_a_v100(7.75)
_FP16 = _on_a_v100(18.64)
_CHECKPOINTING = Published(4 / 3, "a third of a step's FLOPs: arXiv:1604.06174")
COMPILED = Published(5762 / 6667, f"tokens/s of a Llama of 8B on 8 H100, {_TORCHTITAN}")
_FP8 = Published(
    6667 / 8532 * _FP16.slowdown,
    f"as bf16, and 6667 to 8532 tokens/s of a Llama of 8B on 8 H100, {_TORCHTITAN}",
)
_TORCHAO_8BIT = Published(3200 / 3000, f"3200 to 3000 tokens/s for a Llama of 7B ({_TORCHAO})")

_Condition = Callable[[Config], bool]
_Edit = Callable[[Config], Config]


@dataclass(frozen=True)
class Technique:
    """Overrides that change the cost of a step."""

    name: str
    """The overrides, separated by spaces."""
    saves: str
    """Saved resources, for the documentation."""
    does: str = ""
    """Mechanism, in one clause, with a source if no slowdown is published."""
    published: Published | None = None
    cautious: Published | None = None
    """A less favourable measurement, for automatic choices."""
    slowdown_cpu: float | None = None
    numerics: Numerics = Numerics.same
    devices: tuple[str, ...] = (CPU, CUDA)
    """Kinds of device with a possible benefit."""
    searched: bool = False
    """True if `eke fit` searches it."""
    more_memory: tuple[str, ...] = ()
    """Names of techniques with the same results, fewer operations and more memory."""
    applies: _Condition | None = None
    """Condition for memory advice on a configuration. None: never advised."""
    edit: _Edit | None = None
    """Function that applies it and keeps all other values."""

    @property
    def overrides(self) -> tuple[str, ...]:
        """The separate overrides."""
        return tuple(self.name.split())

    @property
    def group(self) -> str:
        """Group of the first override."""
        return group_of(self.name)

    @property
    def keeps_training(self) -> bool:
        """True if training is the same except for rounding."""
        return self.numerics is not Numerics.reduced

    @property
    def slowdown(self) -> float | None:
        """Published slowdown, None if there is none."""
        return self.published.slowdown if self.published else None

    @property
    def reason(self) -> str:
        """Mechanism, and source of the slowdown."""
        source = self.cautious or self.published
        return "; ".join(each for each in (self.does, source.source if source else "") if each)

    def slowdown_on(self, kind: str) -> float:
        """Return the first estimate for a kind of device, 1 without publication."""
        if kind == CPU and self.slowdown_cpu is not None:
            return self.slowdown_cpu
        return 1.0 if self.slowdown is None else self.slowdown


def group_of(override: str) -> str:
    """Return the group of an override: `compile` for `compile.regional=true`."""
    return override.lstrip("+").partition("=")[0].partition(".")[0]


def _set(group: str, **values: Any) -> _Edit:
    return lambda config: replace(config, **{group: replace(getattr(config, group), **values)})


def _change_class(group: str, kind: type, **values: Any) -> _Edit:
    """Return an edit that changes the class of a group and keeps the common fields."""

    def edit(config: Config) -> Config:
        now, names = getattr(config, group), {field.name for field in fields(kind)}
        kept = {f.name: getattr(now, f.name) for f in fields(now) if f.name in names}
        return replace(config, **{group: kind(**(kept | values))})

    return edit


def _plain_kernels(config: Config) -> bool:
    return config.kernels.option == "none" and not config.kernels.fused_linear_cross_entropy


def _float32_weights(config: Config) -> bool:
    now = config.precision
    return now.weights is Weights.float32 and now.float8 is Float8.off


def _copies_weights(config: Config) -> bool:
    """Return whether autocast keeps 16-bit copies of float32 weights."""
    return _float32_weights(config) and config.precision.compute is not Compute.float32


def _plain_adamw(config: Config) -> bool:
    optimizer = config.optimizer
    free = (
        not config.memory.optimizer_in_backward
        and not optimizer_entry(optimizer).stochastic_rounding
    )
    return type(optimizer) is TorchAdamW and free


def _shares_less_than(option: str) -> _Condition:
    def applies(config: Config) -> bool:
        now, stage = config.distributed, STAGE.get(option, max(STAGE.values()) + 1)
        shares = now.option in ("ddp", "zero1", "zero2") and now.num_processes > 1
        return shares and STAGE.get(now.option, 0) < stage

    return applies


_LINKS = "cost depends on the links between devices: arXiv:1910.02054, section 7"
ALL, HALF = "memory=none", "memory=checkpointing memory.every_n=2"

_TABLE = (
    Technique(
        "attention=sdpa", "attention scores", "never slower: arXiv:2205.14135, section 4",
        Published(1.0, ""), searched=True, applies=lambda c: c.attention.option == "eager",
        edit=_set("attention", option="sdpa", backend=Backend.auto),
    ),
    Technique(
        "attention=eager", "time, on a CPU",
        published=Published(
            1.15, "BERT-large of 512 tokens, MLPerf 1.1's speed record: arXiv:2205.14135"
        ),
        slowdown_cpu=1.0, devices=(CPU,), searched=True,
    ),
    Technique("attention=flash2", "time, padding", devices=(CUDA,), searched=True),
    Technique("attention=flash3", "time, padding", devices=(CUDA,), searched=True),
    Technique("compile=none", "compilation", searched=True),
    Technique(
        "compile=inductor compile.regional=true", "time", "compiles one layer for all", COMPILED,
        slowdown_cpu=1.0, searched=True,
    ),
    Technique(
        "compile=inductor", "time", "compiles the whole model", COMPILED, slowdown_cpu=1.0,
        searched=True,
    ),
    Technique(
        "compile=inductor compile.mode=reduce_overhead", "time",
        "launches all kernels of a step at once", COMPILED, devices=(CUDA,), searched=True,
    ),
    Technique("kernels=none", "nothing", searched=True),
    Technique(
        "kernels=fused_linear_cross_entropy", "logits", "never all logits at once",
        Published(1.0, ""), searched=True, applies=_plain_kernels,
        edit=_set(
            "kernels", option="fused_linear_cross_entropy", fused_linear_cross_entropy=True
        ),
    ),
    Technique(
        "kernels=sparse_prediction", "logits", "skips the projection of unlabelled positions",
        searched=True, applies=lambda c: isinstance(c.task, MaskedLM) and _plain_kernels(c),
        edit=_set("kernels", option="sparse_prediction", sparse_prediction=True),
    ),
    Technique("kernels=liger", "activations, time", devices=(CUDA,), searched=True),
    Technique(ALL, "nothing", searched=True),
    Technique(
        "memory=checkpointing_selective", "activations",
        "recomputes cheap operations, 7 % more time", Published(1.07, "arXiv:2205.05198, table 4"),
        searched=True, more_memory=(ALL,),
        applies=lambda c: c.memory.checkpointing is Checkpointing.off,
        edit=_set(
            "memory", option="checkpointing_selective", checkpointing=Checkpointing.selective
        ),
    ),
    Technique(
        HALF, "activations", "runs every second layer's forward pass twice",
        Published((1 + _CHECKPOINTING.slowdown) / 2, _CHECKPOINTING.source), searched=True,
        more_memory=(ALL,),
    ),
    Technique(
        "memory=checkpointing", "activations", "runs each layer's forward pass twice",
        _CHECKPOINTING, searched=True, more_memory=(ALL, HALF),
        applies=lambda c: c.memory.checkpointing is not Checkpointing.full,
        edit=_set("memory", option="checkpointing", checkpointing=Checkpointing.full),
    ),
    Technique(
        "memory=optimizer_in_backward", "gradients",
        "updates each weight when its gradient is ready and frees the gradient (arXiv:2306.09782)",
    ),
    Technique(
        "memory=checkpointing memory.optimizer_in_backward=true", "activations, gradients",
        "computes layers twice, updates weights in the backward pass (arXiv:2306.09782)",
    ),
    Technique(
        "precision=tf32", "time, 16-bit copies of weights", "products on tensor cores",
        Published(1 / 2.25, "T5-base on an A100: huggingface/transformers#15026"),
        numerics=Numerics.mixed, devices=(CUDA,), searched=True, applies=_copies_weights,
        edit=_set("precision", option="tf32", compute=Compute.float32, tf32=AutoBool.on),
    ),
    Technique(
        "precision=fp32", "16-bit copies of weights", f"without tensor cores: {_FP16.source}",
        Published(1.0, ""), numerics=Numerics.mixed, applies=_copies_weights,
        edit=_set("precision", option="fp32", compute=Compute.float32, tf32=AutoBool.off),
    ),
    Technique(
        "precision=bf16", "time, activations", "products on tensor cores", _FP16, slowdown_cpu=1.0,
        numerics=Numerics.mixed, searched=True,
        applies=lambda c: _float32_weights(c) and not _copies_weights(c),
        edit=_set(
            "precision", option="bf16", compute=Compute.bfloat16, tf32=AutoBool.auto
        ),
    ),
    Technique(
        "precision=fp16", "time, activations", "products on tensor cores", _FP16,
        numerics=Numerics.mixed, devices=(CUDA,), searched=True,
    ),
    Technique(
        "precision=bf16_pure", "weights, gradients, states",
        "as fast as bf16, with rounded updates", _FP16, slowdown_cpu=1.0,
        numerics=Numerics.reduced, applies=_float32_weights,
        edit=_set(
            "precision", option="bf16_pure", compute=Compute.bfloat16, weights=Weights.bfloat16,
            tf32=AutoBool.auto,  # the presets keep it on auto, fp32 turns it off
        ),
    ),
    Technique(
        "precision=bf16_pure optimizer=adamw_bf16_sr", "weights, gradients, states",
        "weights, gradients and moments in bfloat16, rounded at random: small updates are right on "
        f"average ({_TORCHAO})",
        _FP16, slowdown_cpu=1.0, numerics=Numerics.reduced, searched=True,
    ),
    Technique(
        "precision=bf16_pure precision.master=on", "gradients", "updates float32 copies of weights",
        _FP16, slowdown_cpu=1.0, numerics=Numerics.reduced, searched=True,
    ),
    Technique(
        "precision=fp8", "time", "products of linear layers in float8", _FP8,
        numerics=Numerics.reduced, devices=(CUDA,), searched=True,
    ),
    Technique(
        "optimizer=adamw_8bit", "optimizer states", "moments in 8 bits", _on_a_v100(9.15),
        _TORCHAO_8BIT, numerics=Numerics.reduced, searched=True, applies=_plain_adamw,
        edit=partial(replace, optimizer=AdamW8bit(option="adamw_8bit")),
    ),
    Technique(
        "optimizer=adamw_torchao_8bit", "optimizer states",
        "moments in 8 bits, embeddings included", _TORCHAO_8BIT, numerics=Numerics.reduced,
    ),
    Technique(
        "optimizer=adafactor", "optimizer states",
        "sums of rows and columns instead of two moments", _on_a_v100(7.96),
        numerics=Numerics.reduced, applies=_plain_adamw,
        edit=partial(replace, optimizer=Adafactor(option="adafactor")),
    ),
    Technique(
        "distributed=zero2", "gradients, states", _LINKS, applies=_shares_less_than("zero2"),
        edit=_set("distributed", option="zero2"),
    ),
    Technique(
        "distributed=zero3", "weights, gradients, states", _LINKS,
        applies=_shares_less_than("zero3"), edit=_set("distributed", option="zero3"),
    ),
    Technique(
        "distributed=fsdp", "weights, gradients, states", _LINKS, applies=_shares_less_than("fsdp"),
        edit=_change_class("distributed", FSDP, option="fsdp", deepspeed_config=None),
    ),
    Technique(
        "offload=optimizer_cpu", "optimizer states",
        "cost depends on the host and its link to the device: arXiv:2101.06840, section 6",
        devices=(CUDA,),
        applies=lambda c: c.distributed.option in ("zero2", "zero3") and c.offload.option == "none",
        edit=_set("offload", option="optimizer_cpu"),
    ),
    Technique(
        "distributed=zero2 distributed.num_processes=1 offload=optimizer_cpu", "optimizer states",
        "states in host memory and updates on the host",
        Published(3.13 / 1.27, f"1.27 to 3.13 s a step of ViT-H, untuned ({_TORCHAO})"),
        devices=(CUDA,),
    ),
    Technique(
        "distributed=zero3 distributed.num_processes=1 offload=params_cpu", "weights, states",
        "states and weights in host memory (arXiv:2101.06840). The slowdown depends on the host",
        devices=(CUDA,),
    ),
    Technique(
        "peft=lora", "gradients, states", "trains only added matrices",
        Published(0.8, "a quarter faster: arXiv:2106.09685, section 4.2"),
        numerics=Numerics.reduced, applies=lambda c: c.peft.option == "none" and not c.model.freeze,
        edit=partial(replace, peft=Lora(option="lora")),
    ),
    Technique(
        "peft=qlora", "weights, gradients, states",
        "unpacks each layer for its use: arXiv:2305.14314, section 3",
        numerics=Numerics.reduced,
        applies=lambda c: c.peft.option in ("none", "lora") and not c.model.freeze,
        edit=_change_class("peft", QLora, option="qlora"),
    ),
)  # fmt: skip

TECHNIQUES: Mapping[str, Technique] = {each.name: each for each in _TABLE}
"""Name -> technique. Within a group, techniques with the mildest consequences come first."""


def applied(config: Config, techniques: Iterable[Technique]) -> Config | None:
    """Apply techniques in order. Return None if one does not apply."""
    for technique in techniques:
        if not (technique.edit and technique.applies and technique.applies(config)):
            return None
        config = technique.edit(config)
    return config


def precision_slowdown(config: Config) -> float:
    """Return the published step time relative to float32 for a precision, 1 if unknown."""
    now = TECHNIQUES.get(f"precision={config.precision.option}")
    return (now.slowdown if now else None) or 1.0
