"""Schemas of techniques: formats, memory, adapters, offload, optimizers and schedules."""

from dataclasses import dataclass, field
from enum import Enum

from eke.config.schema.fields import (
    Key,
    Limit,
    OptionGroup,
    Switch,
    above,
    at_least,
    below,
    between,
)


class Compute(Enum):
    """Number format of matrix multiplications and attention."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Weights(Enum):
    """Number format of weights and gradients."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class Casts(Enum):
    """How often a trained float32 weight is rounded to 16 bits."""

    per_use = "per_use"
    """In each forward pass, by autocast."""
    per_step = "per_step"
    """Once an optimizer step."""


class Float8(Enum):
    """How the operands of linear layers are scaled into float8's narrow range."""

    off = "off"
    tensorwise = "tensorwise"
    """One scale per tensor."""
    rowwise = "rowwise"
    """One scale per row or column: closer, and slower."""


class Evaluation(Enum):
    """Number format of matrix multiplications in evaluation."""

    same = "same"
    """That of training."""
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@dataclass
class Precision(OptionGroup):
    """Number formats of one training step."""

    option: str = "fp32"
    compute: Compute = field(default=Compute.float32, metadata=Key.ROUNDING)
    """Format of the forward pass: autocast over float32 weights, or simply that of the weights."""
    weights: Weights = field(default=Weights.float32, metadata=Key.BOTH)
    """Format of weights and gradients, and of the states of optimizers that follow it."""
    master: Switch = field(default=Switch.auto, metadata=Key.BOTH)
    """Float32 copies of bfloat16 weights, for the optimizer to step on; auto is off."""
    casts: Casts = field(default=Casts.per_use, metadata=Key.BOTH)
    """per_step computes with 16-bit copies of float32 weights, made once for all micro-batches of a
    step; norms and the residual stream are 16 bits wide then, too."""
    float8: Float8 = field(default=Float8.off, metadata=Key.BOTH)
    """Products inside linear layers in float8, all but the first and last layer's (torchao)."""
    tf32: Switch = field(default=Switch.auto, metadata=Key.ROUNDING)
    """TF32 for the float32 matrix multiplications that remain; auto is PyTorch's default, off."""
    evaluation: Evaluation = field(default=Evaluation.same, metadata=Key.ROUNDING)
    """Autocast format in evaluation; the weights stay as training needs them."""


class Checkpointing(Enum):
    """Which activations are recomputed in the backward pass instead of being kept."""

    off = "off"
    full = "full"
    selective = "selective"


@dataclass
class Memory(OptionGroup):
    """Techniques against the memory of activations and gradients."""

    checkpointing: Checkpointing = field(default=Checkpointing.off, metadata=Key.ROUNDING)
    """full recomputes layers in the backward pass; selective does, too, but keeps what their
    matrix multiplications and fused attention gave."""
    every_n: int = field(default=1, metadata=Key.ROUNDING | at_least(1))
    """Recompute the first of every n layers, and keep the activations of the others."""
    activation_offload: bool = field(default=False, metadata=Key.ROUNDING)
    """Keep activations in host memory between forward and backward pass."""
    empty_cache_every: int | None = field(default=None, metadata=Key.ROUNDING | at_least(1))
    """Steps between two in which unused blocks of the allocator go back to the GPU's driver;
    null: never."""
    optimizer_in_backward: bool = field(default=False, metadata=Key.ROUNDING)
    """Update each weight as soon as its gradient is there, and free the gradient."""


class TrainedBias(Enum):
    """Which biases are trained in addition to the adapters."""

    none = "none"
    lora_only = "lora_only"


class BaseWeights(Enum):
    """Number format of weights that are not trained; auto: the one that is computed in."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class FourBits(Enum):
    """The sixteen values that a 4-bit weight may have, before its block's scale."""

    nf4 = "nf4"
    fp4 = "fp4"


@dataclass
class Peft(OptionGroup):
    """Which parameters are trained: all, or a few added ones."""


@dataclass
class Adapters(Peft):
    """Added parameters; the model's own are frozen, but for the head a classification task adds."""

    base_weights: BaseWeights = field(default=BaseWeights.auto, metadata=Key.BOTH)
    """Format of all frozen weights; auto is that of precision.compute. Adapters and trained heads
    are float32."""
    target_modules: list[str] | None = field(default=None, metadata=Key.BOTH)
    """Linear layers that are adapted, by the end of their names: [q_proj,v_proj]. null is every
    one in a Transformer layer (ia3: keys, values and the feed-forward's last)."""


@dataclass
class Lora(Adapters):
    """Low-rank updates W + (alpha / r) B A of linear layers' weights; B starts at zero."""

    r: int = field(default=16, metadata=Key.BOTH | at_least(1))
    """Rank: rows of A, columns of B."""
    alpha: float = field(default=32.0, metadata=Key.LEARNING | above(0))
    """Scale of the update, over r (over the square root of r with use_rslora)."""
    dropout: float = field(default=0.0, metadata=Key.SWITCHED | below(0, 1))
    """Of the adapters' input, while training."""
    bias: TrainedBias = field(default=TrainedBias.none, metadata=Key.BOTH)
    """Train the biases of the adapted layers, too."""
    use_rslora: bool = field(default=False, metadata=Key.LEARNING)
    """Divide alpha by the square root of r instead of by r (arXiv:2312.03732)."""
    fused: bool = field(default=False, metadata=Key.ROUNDING)
    """Layers that read the same tensor share a product, and less is kept for the backward pass."""
    experts: bool = field(default=False, metadata=Key.BOTH)
    """Adapt the routed experts of a mixture, too, each with matrices of rank r."""


@dataclass
class QLora(Lora):
    """LoRA over weights that are kept in 4 bits."""

    quant_type: FourBits = field(default=FourBits.nf4, metadata=Key.BOTH)
    """nf4 has the quantiles of a normal distribution, fp4 a sign, exponents and a mantissa bit."""
    double_quant: bool = field(default=True, metadata=Key.BOTH)
    """Keep the blocks' scales in 8 bits."""


PEFTS: dict[str, type] = {"none": Peft, "lora": Lora, "qlora": QLora, "ia3": Adapters}
"""Schema name -> class."""


class WeightsPlace(Enum):
    """Where the weights that the model computes with wait for their turn."""

    device = "device"
    host = "host"
    disk = "disk"


@dataclass
class Offload(OptionGroup):
    """Which parts of the training state wait in host memory or on a disk."""


@dataclass
class NvmeOffload(Offload):
    """Optimizer state in files on a local disk, read and written in every step."""

    path: str = field(default="???", metadata=Key.NONE)
    """Folder on a local NVMe disk; the run's files in it are removed when the run ends."""
    weights: WeightsPlace = field(default=WeightsPlace.device, metadata=Key.ROUNDING)
    """Where the weights wait that the model computes with: on the device, in host memory
    (as in params_cpu), or on the disk as well (refused: DeepSpeed 0.19 fails)."""
    piece_numbers: int = field(default=100_000_000, metadata=Key.ROUNDING | between(2**18, 10**9))
    """Numbers of one process that are updated at a time, 4 bytes each; host memory holds four such
    buffers (DeepSpeed's sub_group_size; 1e9, its default, takes 16 GB)."""
    block_bytes: int = field(default=2**20, metadata=Key.ROUNDING | between(2**12, 2**30))
    """Bytes of one read or write (DeepSpeed's aio.block_size, its default)."""
    queue_depth: int = field(default=8, metadata=Key.ROUNDING | between(1, 1024))
    """Reads or writes under way at a time (DeepSpeed's aio.queue_depth, its default)."""
    threads: int = field(default=1, metadata=Key.ROUNDING | between(1, 64))
    """Threads that share the transfer of one tensor (DeepSpeed's aio.intra_op_parallelism, its
    default)."""


OFFLOADS: dict[str, type] = {"memory": Offload, "nvme": NvmeOffload}
"""Schema name -> class."""

MAX_LR = 100
"""Above the largest learning rate in use, 30 (plain SGD of an LSTM, arXiv:1708.02182)."""
MAX_WEIGHT_DECAY = 100
"""Above every one in use: at a learning rate of 0.01 a step then sets the weights to 0."""
MAX_EPS = 1
"""The largest in use (Inception's, arXiv:1512.00567): above it, updates are gradients / eps."""


@dataclass
class Optimizer(OptionGroup):
    """What every optimizer has."""

    option: str = "adamw"
    lr: float = field(default=1e-3, metadata=Key.LEARNING | above(0, MAX_LR))
    """Peak learning rate, before the schedule."""
    weight_decay: float = field(default=0.01, metadata=Key.LEARNING | between(0, MAX_WEIGHT_DECAY))
    """Decoupled decay of matrices; biases and normalisation weights are never decayed."""


@dataclass
class AdamW(Optimizer):
    """What every AdamW has."""

    beta1: float = field(default=0.9, metadata=Key.LEARNING | below(0, 1))
    """Decay of the first moment."""
    beta2: float = field(default=0.999, metadata=Key.LEARNING | below(0, 1))
    """Decay of the second moment."""
    eps: float = field(default=1e-8, metadata=Key.LEARNING | above(0, MAX_EPS))
    """Added to the denominator."""


class Implementation(Enum):
    """Loop over the weights of AdamW."""

    auto = "auto"
    """The plan chooses."""
    fused = "fused"
    foreach = "foreach"
    forloop = "forloop"
    apex = "apex"
    """NVIDIA's, of another package."""


@dataclass
class TorchAdamW(AdamW):
    """AdamW in one of its implementations, which compute the same."""

    implementation: Implementation = field(default=Implementation.auto, metadata=Key.ROUNDING)
    """Loop over the weights; also as `optimizer=adamw_fused` and so on."""


@dataclass
class Adafactor(Optimizer):
    """transformers' Adafactor with a fixed learning rate (relative_step off)."""

    clip_threshold: float = field(default=1.0, metadata=Key.LEARNING | above(0))
    """Limit of the root mean square of an update."""
    decay_rate: float = field(default=-0.8, metadata=Key.LEARNING | between(-1, 0))
    """Exponent of the second moment's decay over steps (arXiv:1804.04235, section 7.2)."""
    eps1: float = field(default=1e-30, metadata=Key.LEARNING | above(0))
    """Added to the squared gradient."""


@dataclass
class SGD(Optimizer):
    """Stochastic gradient descent."""

    momentum: float = field(default=0.9, metadata=Key.SWITCHED | between(0, 1))
    """0 keeps no state at all."""
    nesterov: bool = field(default=False, metadata=Key.LEARNING)
    """Nesterov momentum."""


@dataclass
class AdamW8bit(AdamW):
    """bitsandbytes' AdamW, its moments in 8 bits with a scale for each block of 256."""

    min_8bit_size: int = field(default=4096, metadata=Key.BOTH | at_least(0))
    """Tensors with fewer numbers keep 32-bit moments."""
    embeddings_32bit: bool = field(default=True, metadata=Key.BOTH)
    """32-bit moments for embeddings, which 8 bits make unstable (arXiv:2110.02861, section 2.3)."""


@dataclass
class AdamWTorchAO8bit(AdamW):
    """torchao's AdamW with 8-bit moments, of tensors of 4096 numbers or more."""

    block_size: int = field(default=256, metadata=Key.BOTH | between(1, 4096))
    """Numbers that share a scale; a tensor that it does not divide keeps unquantised moments."""


@dataclass
class AdamWTorchAO4bit(AdamW):
    """torchao's AdamW with 4-bit moments, of tensors of 4096 numbers or more."""

    block_size: int = field(default=128, metadata=Key.BOTH | between(1, 4096))
    """Numbers that share a scale; a tensor that it does not divide keeps unquantised moments."""


@dataclass
class Lion(Optimizer):
    """Lion: the sign of an interpolated momentum (arXiv:2302.06675)."""

    beta1: float = field(default=0.9, metadata=Key.LEARNING | below(0, 1))
    """Share of the momentum in the update."""
    beta2: float = field(default=0.99, metadata=Key.LEARNING | below(0, 1))
    """Decay of the momentum."""


@dataclass
class Lion8bit(Lion):
    """bitsandbytes' Lion, its momentum in 8 bits with a scale for each block of 256."""

    min_8bit_size: int = field(default=4096, metadata=Key.BOTH | at_least(0))
    """Tensors with fewer numbers keep a 32-bit momentum."""
    embeddings_32bit: bool = field(default=True, metadata=Key.BOTH)
    """A 32-bit momentum for embeddings."""


class AdjustLR(Enum):
    """How Muon's learning rate depends on a matrix' shape; torch's names."""

    original = "original"
    match_rms_adamw = "match_rms_adamw"


@dataclass
class Muon(AdamW):
    """torch's Muon for the matrices of Transformer layers, AdamW for everything else."""

    momentum: float = field(default=0.95, metadata=Key.SWITCHED | below(0, 1))
    """Decay of the momentum that is orthogonalised."""
    nesterov: bool = field(default=True, metadata=Key.LEARNING)
    """Nesterov momentum."""
    ns_steps: int = field(default=5, metadata=Key.BOTH | between(1, 99))
    """Newton-Schulz iterations."""
    adjust_lr: AdjustLR = field(default=AdjustLR.match_rms_adamw, metadata=Key.LEARNING)
    """match_rms_adamw makes updates as large as AdamW's, so that its learning rate and decay serve
    (arXiv:2502.16982, section 2.2); original is sqrt(max(1, rows / columns))."""
    adamw_lr: float | None = field(default=None, metadata=Key.LEARNING | above(0, MAX_LR))
    """Peak learning rate of everything else; null takes `lr`."""


@dataclass
class ScheduleFree(AdamW):
    """Schedule-Free AdamW (arXiv:2405.15682): an average of weights in place of a schedule."""

    beta1: float = field(
        default=0.9, metadata=Key.LEARNING | {"limit": Limit(0, 1, low_open=True, high_open=True)}
    )
    """Share of the average in the weights that gradients are taken at."""
    average_power: float = field(default=0.0, metadata=Key.LEARNING | at_least(0))
    """Weights enter the average by this power of the step's number (r in the paper)."""
    lr_power: float = field(default=2.0, metadata=Key.LEARNING | at_least(0))
    """Weights enter the average by this power of the largest learning rate so far."""


@dataclass
class GaLore(AdamW):
    """AdamW on gradients projected by their leading singular vectors (arXiv:2403.03507)."""

    rank: int | None = field(default=None, metadata=Key.BOTH | at_least(1))
    """Singular vectors kept of a matrix inside a layer; null takes a quarter of the width."""
    update_proj_gap: int = field(default=200, metadata=Key.BOTH | at_least(1))
    """Steps between two singular value decompositions."""
    scale: float = field(default=0.25, metadata=Key.LEARNING | above(0))
    """Factor of projected updates."""


class ScaleType(Enum):
    """What shares one of APOLLO's scaling factors."""

    channel = "channel"
    tensor = "tensor"


@dataclass
class Apollo(AdamW):
    """SGD scaled as a randomly projected AdamW would scale it (arXiv:2412.05270)."""

    rank: int | None = field(default=None, metadata=Key.BOTH | at_least(1))
    """Rows of a matrix' random projection; null takes a quarter of the width."""
    update_proj_gap: int = field(default=200, metadata=Key.BOTH | at_least(1))
    """Steps between two random projections."""
    scale: float = field(default=1.0, metadata=Key.LEARNING | above(0))
    """Updates are multiplied by its square root; APOLLO-Mini has 128 at rank 1."""
    scale_type: ScaleType = field(default=ScaleType.channel, metadata=Key.BOTH)
    """tensor is APOLLO-Mini's."""


OPTIMIZERS: dict[str, type] = {
    "adamw": TorchAdamW,
    "adamw_8bit": AdamW8bit,
    "adamw_torchao_8bit": AdamWTorchAO8bit,
    "adamw_torchao_4bit": AdamWTorchAO4bit,
    "adafactor": Adafactor,
    "apollo": Apollo,
    "galore": GaLore,
    "lion": Lion,
    "lion_8bit": Lion8bit,
    "muon": Muon,
    "schedule_free": ScheduleFree,
    "sgd": SGD,
}
"""Schema name -> class, for the options that do not have the fields of `Optimizer` alone."""


@dataclass
class Schedule(OptionGroup):
    """Learning rate over steps."""

    option: str = "cosine"
    warmup_steps: int | None = field(default=None, metadata=Key.LEARNING | at_least(0))
    """Linear warm-up in steps; null takes `warmup_frac` of the run."""
    warmup_frac: float = field(default=0.05, metadata=Key.LEARNING | between(0, 1))
    """Linear warm-up as a share of the run."""


@dataclass
class DecayingSchedule(Schedule):
    """A schedule that ends below its peak."""

    final_frac: float = field(default=0.0, metadata=Key.LEARNING | between(0, 1))
    """Learning rate at the end, as a share of the peak."""


@dataclass
class WSDSchedule(DecayingSchedule):
    """Warm-up, stable, decay (Hu et al. 2024, arXiv:2404.06395)."""

    decay_frac: float = field(default=0.2, metadata=Key.LEARNING | between(0, 1))
    """Share of the run spent on the final linear decay."""


SCHEDULES: dict[str, type] = {
    "constant": Schedule,
    "decaying": DecayingSchedule,
    "wsd": WSDSchedule,
}
"""Schema name -> class."""
