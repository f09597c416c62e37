"""What of a plan decides how large its activations are: numbers only."""

from dataclasses import dataclass
from typing import cast

from eke.common.units import MIB
from eke.config.schema import FSDP, Adapters, Config, Data, MixtralModel, Packing, T5Model
from eke.models.families import head_width
from eke.models.sizes import FLOAT32_BYTES, is_ragged, predicted_frac
from eke.plan.planner import Micro, Plan, drawn, shares_heads

NARROW_BYTES = 2
"""Of bfloat16 and float16."""

PROBABLE_DROPOUT = 0.1
"""Of a checkpoint that says its own: BERT's, GPT-2's and T5's configurations have it."""

WITHOUT_DROPOUT = ("llama", "qwen2", "qwen3", "mixtral")
"""Families whose checkpoints have none."""


@dataclass(frozen=True)
class Shape:
    """Lengths, widths and number formats of one forward pass on one device."""

    family: str
    layers: int
    decoder_layers: int
    """Of T5; 0 elsewhere."""
    rows: int
    """Sequences of a micro-batch."""
    source: int
    """Tokens of each, at most."""
    target: int
    """Tokens of the decoder's sequences in T5; else as `source`."""
    hidden: int
    inner: int
    """Width of the feed-forward layer."""
    heads: int
    queries: int
    """Query heads x width of one."""
    keys: int
    """Key and value heads x width of one."""
    repeated: int
    """The same as attention is handed them: repeated where its kernel cannot share them."""
    vocabulary: int
    predicted: float
    """Share of `target` that is projected onto it."""
    experts: int
    chosen: int
    """Experts that a token passes through."""
    gated: bool
    dropout: float
    weights: int
    """Bytes of a weight, and of the residual stream."""
    compute: int
    """Bytes of an operand of matrix multiplications."""
    on_cpu: bool
    masked: bool
    """Attention is given a mask: rows are padded or packed."""

    @property
    def cast(self) -> bool:
        """Whether autocast narrows operands."""
        return self.compute < self.weights

    @property
    def tokens(self) -> int:
        """Of a micro-batch, padding included."""
        return self.rows * self.source

    @property
    def mask_bytes(self) -> int:
        """Of one dropped number: CPUs keep the noise in the format of what is dropped."""
        return self.compute if self.on_cpu else 1


def shape_of(plan: Plan, micro: Micro | None = None) -> Shape:
    """The shape of a forward pass: of a training's longest micro-batch, unless one is given."""
    config, model = plan.config, plan.config.model
    heads = model.num_attention_heads or 1
    width = model.hidden_size // heads
    if isinstance(model, T5Model) or hasattr(model, "head_dim"):
        width = head_width(cast(T5Model, model)) if model.num_attention_heads else width
    grouped = getattr(model, "num_key_value_heads", None) or heads
    encoder_decoder = model.family == "t5"
    decoders = getattr(model, "num_decoder_layers", None) or model.num_hidden_layers
    micro = micro or drawn(plan).expected
    weights = FLOAT32_BYTES if plan.compute.weights == "float32" else NARROW_BYTES
    return Shape(
        family=model.family,
        layers=model.num_hidden_layers,
        decoder_layers=decoders if encoder_decoder else 0,
        rows=micro.rows,
        source=micro.source,
        target=micro.target,
        hidden=model.hidden_size,
        inner=model.intermediate_size or 4 * model.hidden_size,
        heads=heads,
        queries=heads * width,
        keys=grouped * width,
        repeated=(grouped if shares_heads(plan) else heads) * width,
        vocabulary=model.vocab_size,
        predicted=predicted_frac(config, micro.target),
        experts=getattr(model, "num_local_experts", 0) if _is_moe(config) else 0,
        chosen=getattr(model, "num_experts_per_tok", 0) if _is_moe(config) else 0,
        gated=bool(getattr(model, "gated", False)),
        dropout=_dropout(config),
        weights=weights,
        compute=NARROW_BYTES if plan.compute.autocast else weights,
        on_cpu=plan.device.kind == "cpu",
        masked=_is_masked(config.data, is_ragged(config)),
    )


def _is_masked(data: Data, ragged: bool) -> bool:
    packed = data.packing is not Packing.off
    return ragged or packed or data.seq_len % (data.pad_to_multiple_of or 1) != 0


def _is_moe(config: Config) -> bool:
    return isinstance(config.model, MixtralModel) or config.model.family == "mixtral"


def _dropout(config: Config) -> float:
    if config.model.dropout is not None:
        return config.model.dropout
    return 0.0 if config.model.family in WITHOUT_DROPOUT else PROBABLE_DROPOUT


def trains_adapters(config: Config) -> bool:
    """Whether the model's own weights are frozen."""
    return isinstance(config.peft, Adapters)


def is_fsdp(config: Config) -> bool:
    """Whether torch's FSDP2 shares the model out."""
    return isinstance(config.distributed, FSDP)


WORKSPACE_BYTES = {"hopper": 32 * MIB, "other": 8 * MIB + 128 * 1024}
"""cuBLAS' workspace per handle and stream: torch's `parseChosenWorkspaceSize`
(aten/src/ATen/cuda/CublasHandlePool.cpp): 4096 KiB x 8 from capability 9.0 on, else 4096 KiB x 2 +
16 KiB x 8."""
