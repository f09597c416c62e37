"""Schemas of techniques: number formats, memory, adapters, offload, optimizers and schedules."""

from dataclasses import dataclass, field
from enum import Enum

from eke.config.schema.fields import (
    AutoBool,
    Key,
    Limit,
    OptionGroup,
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
    """Times at which trained float32 weights are rounded to 16 bits."""

    per_use = "per_use"
    """Cast in each forward pass, by autocast."""
    per_step = "per_step"
    """Cast once per optimizer step."""


class Float8(Enum):
    """Scaling of the operands of linear layers to the range of float8."""

    off = "off"
    tensorwise = "tensorwise"
    """One scale per tensor."""
    rowwise = "rowwise"
    """One scale per row or column: more accurate and slower."""


class Evaluation(Enum):
    """Number format of matrix multiplications in evaluation."""

    same = "same"
    """Format of training."""
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@dataclass
class Precision(OptionGroup):
    """Number formats of a training step."""

    option: str = "fp32"
    compute: Compute = field(default=Compute.float32, metadata=Key.ROUNDING)
    """Format of the forward pass. Float32 weights are autocast, bfloat16 weights are not."""
    weights: Weights = field(default=Weights.float32, metadata=Key.BOTH)
    """Format of weights and gradients. Some optimizers also use it for their state."""
    master: AutoBool = field(default=AutoBool.auto, metadata=Key.BOTH)
    """Keep float32 copies of bfloat16 weights for the optimizer. auto: off."""
    casts: Casts = field(default=Casts.per_use, metadata=Key.BOTH)
    """Casts of float32 weights to 16 bits. per_use: in each forward pass, by autocast. per_step:
    once per optimizer step. Norms and the residual stream are then also 16 bits wide."""
    float8: Float8 = field(default=Float8.off, metadata=Key.BOTH)
    """Use float8 products in linear layers (torchao). The first and the last layer are excluded."""
    tf32: AutoBool = field(default=AutoBool.auto, metadata=Key.ROUNDING)
    """Use TF32 for float32 matrix multiplications. auto: PyTorch's default, off."""
    evaluation: Evaluation = field(default=Evaluation.same, metadata=Key.ROUNDING)
    """Autocast format in evaluation. The format of the weights does not change."""


class Checkpointing(Enum):
    """Activations that the backward pass recomputes."""

    off = "off"
    full = "full"
    selective = "selective"


@dataclass
class Memory(OptionGroup):
    """Techniques that reduce the memory of activations and gradients."""

    checkpointing: Checkpointing = field(default=Checkpointing.off, metadata=Key.ROUNDING)
    """Recompute activations in the backward pass. full: recompute each layer. selective: keep the
    results of matrix products and fused attention."""
    every_n: int = field(default=1, metadata=Key.ROUNDING | at_least(1))
    """Recompute one of every n layers. The activations of the other layers are kept."""
    activation_offload: bool = field(default=False, metadata=Key.ROUNDING)
    """Keep activations in host memory until the backward pass."""
    empty_cache_every: int | None = field(default=None, metadata=Key.ROUNDING | at_least(1))
    """Steps between calls of `torch.cuda.empty_cache`. It frees unused memory. null: never."""
    optimizer_in_backward: bool = field(default=False, metadata=Key.ROUNDING)
    """Update each weight as soon as its gradient is computed. The gradient is then freed."""


class TrainedBias(Enum):
    """Biases that are trained together with the adapters."""

    none = "none"
    lora_only = "lora_only"


class BaseWeights(Enum):
    """Number format of frozen weights."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class _FourBits(Enum):
    """Set of the sixteen values of a 4-bit weight, before scaling."""

    nf4 = "nf4"
    fp4 = "fp4"


@dataclass
class Peft(OptionGroup):
    """Parameters that are trained: all, or a few added parameters."""

    @property
    def is_dora(self) -> bool:
        """Whether adapters also train the norm of each row of a weight (DoRA)."""
        return self.option == "dora"


@dataclass
class Adapters(Peft):
    """Trained adapters in a frozen model. The head of a classification task is also trained."""

    base_weights: BaseWeights = field(default=BaseWeights.auto, metadata=Key.BOTH)
    """Format of frozen weights. auto: precision.compute. Adapters and heads are float32."""
    target_modules: list[str] | None = field(default=None, metadata=Key.BOTH)
    """Linear layers with adapters, by the end of their names. Example: [q_proj,v_proj]. null: all
    linear layers of the Transformer blocks (ia3: keys, values and the last layer of the
    feed-forward)."""


@dataclass
class Lora(Adapters):
    """Low-rank updates W + (alpha / r) B A of linear layers. B starts at zero."""

    r: int = field(default=16, metadata=Key.BOTH | at_least(1))
    """Rank: number of rows of A and of columns of B."""
    alpha: float = field(default=32.0, metadata=Key.LEARNING | above(0))
    """Scale of the update. Divided by r (with use_rslora: by the square root of r)."""
    dropout: float = field(default=0.0, metadata=Key.SWITCHED | below(0, 1))
    """Dropout probability of the adapters' input in training."""
    bias: TrainedBias = field(default=TrainedBias.none, metadata=Key.BOTH)
    """Biases to train. lora_only: the biases of the adapted layers."""
    use_rslora: bool = field(default=False, metadata=Key.LEARNING)
    """Divide alpha by the square root of r (arXiv:2312.03732). false: divide by r."""
    fused: bool = field(default=False, metadata=Key.ROUNDING)
    """Compute layers with the same input in one product. Saves less for the backward pass."""
    experts: bool = field(default=False, metadata=Key.BOTH)
    """Also adapt the routed experts of a mixture of experts. Each expert has matrices of rank r."""


@dataclass
class QLora(Lora):
    """LoRA with 4-bit frozen weights."""

    quant_type: _FourBits = field(default=_FourBits.nf4, metadata=Key.BOTH)
    """Format of 4-bit weights. nf4: quantiles of a normal distribution. fp4: floating point."""
    double_quant: bool = field(default=True, metadata=Key.BOTH)
    """Keep the scales of the blocks in 8 bits."""


PEFTS: dict[str, type] = {"none": Peft, "lora": Lora, "qlora": QLora, "ia3": Adapters}
"""Schema name -> class."""


class WeightsPlace(Enum):
    """Place of the weights between two uses."""

    device = "device"
    host = "host"
    disk = "disk"


@dataclass
class Offload(OptionGroup):
    """Parts of the training state that are kept in host memory or on a disk."""

    @property
    def moves_weights(self) -> bool:
        """Whether the weights leave the device between two uses."""
        place = getattr(self, "weights", WeightsPlace.device)
        return self.option == "params_cpu" or place is not WeightsPlace.device


@dataclass
class NvmeOffload(Offload):
    """Optimizer state in files on a local disk, read and written in every step."""

    path: str = field(default="???", metadata=Key.NONE)
    """Folder on a local NVMe disk. The files of a run are removed when the run ends."""
    weights: WeightsPlace = field(default=WeightsPlace.device, metadata=Key.ROUNDING)
    """Place of the compute weights. host: as in params_cpu. disk: rejected (DeepSpeed 0.19)."""
    piece_numbers: int = field(default=100_000_000, metadata=Key.ROUNDING | between(2**18, 10**9))
    """Elements that a process updates at a time. Host memory holds four such buffers with 4 bytes
    per element. DeepSpeed calls it sub_group_size. Its default, 1e9, takes 16 GB."""
    block_bytes: int = field(default=2**20, metadata=Key.ROUNDING | between(2**12, 2**30))
    """Bytes per read or write. DeepSpeed's aio.block_size and its default."""
    queue_depth: int = field(default=8, metadata=Key.ROUNDING | between(1, 1024))
    """Number of concurrent reads or writes. DeepSpeed's aio.queue_depth and its default."""
    threads: int = field(default=1, metadata=Key.ROUNDING | between(1, 64))
    """Threads that transfer a tensor. DeepSpeed's aio.intra_op_parallelism and its default."""


_MAX_LR = 100
"""Exceeds the largest learning rate in use, 30 (SGD of an LSTM, arXiv:1708.02182)."""
_MAX_WEIGHT_DECAY = 100
"""Exceeds every value in use. With a learning rate of 0.01, a step sets the weights to 0."""
_MAX_EPS = 1
"""Largest value in use (Inception, arXiv:1512.00567). Above it, updates are gradients / eps."""


@dataclass
class Optimizer(OptionGroup):
    """Keys of all optimizers."""

    option: str = "adamw"
    lr: float = field(default=1e-3, metadata=Key.LEARNING | above(0, _MAX_LR))
    """Peak learning rate of the schedule."""
    weight_decay: float = field(default=0.01, metadata=Key.LEARNING | between(0, _MAX_WEIGHT_DECAY))
    """Decoupled weight decay of matrices. Biases and normalisation weights are not decayed."""


@dataclass
class AdamW(Optimizer):
    """Keys of all AdamW optimizers."""

    beta1: float = field(default=0.9, metadata=Key.LEARNING | below(0, 1))
    """Decay of the first moment."""
    beta2: float = field(default=0.999, metadata=Key.LEARNING | below(0, 1))
    """Decay of the second moment."""
    eps: float = field(default=1e-8, metadata=Key.LEARNING | above(0, _MAX_EPS))
    """Epsilon added to the denominator of the update."""


class Implementation(Enum):
    """Implementation of torch's AdamW."""

    auto = "auto"
    """Chosen by the plan."""
    fused = "fused"
    foreach = "foreach"
    forloop = "forloop"
    apex = "apex"
    """Kernel of NVIDIA apex."""


@dataclass
class TorchAdamW(AdamW):
    """AdamW of torch or apex. All implementations compute the same update."""

    implementation: Implementation = field(default=Implementation.auto, metadata=Key.ROUNDING)
    """Implementation, also set by options such as adamw_fused. auto: the plan chooses."""


@dataclass
class Adafactor(Optimizer):
    """transformers' Adafactor with a fixed learning rate (relative_step off)."""

    clip_threshold: float = field(default=1.0, metadata=Key.LEARNING | above(0))
    """Maximum root mean square of an update."""
    decay_rate: float = field(default=-0.8, metadata=Key.LEARNING | between(-1, 0))
    """Exponent of the second moment's decay over steps. Source: arXiv:1804.04235, section 7.2."""
    eps1: float = field(default=1e-30, metadata=Key.LEARNING | above(0))
    """Epsilon added to the squared gradient."""


@dataclass
class SGD(Optimizer):
    """Stochastic gradient descent."""

    momentum: float = field(default=0.9, metadata=Key.SWITCHED | between(0, 1))
    """Decay of the momentum. sgd: 0 keeps no optimizer state."""
    nesterov: bool = field(default=False, metadata=Key.LEARNING)
    """Use Nesterov momentum."""


@dataclass
class AdamW8bit(AdamW):
    """bitsandbytes' AdamW with 8-bit moments and a scale per block of 256 elements."""

    min_8bit_size: int = field(default=4096, metadata=Key.BOTH | at_least(0))
    """Minimum elements of a tensor with 8-bit state. Smaller tensors keep 32-bit state."""
    embeddings_32bit: bool = field(default=True, metadata=Key.BOTH)
    """Keep 32-bit state for embeddings. 8-bit state makes them unstable (arXiv:2110.02861, section
    2.3)."""


@dataclass
class AdamWTorchAO8bit(AdamW):
    """torchao's AdamW with 8-bit moments for tensors of at least 4096 elements."""

    block_size: int = field(default=256, metadata=Key.BOTH | between(1, 4096))
    """Elements per scale. Tensors that it does not divide keep unquantised moments."""


@dataclass
class AdamWTorchAO4bit(AdamW):
    """torchao's AdamW with 4-bit moments for tensors of at least 4096 elements."""

    block_size: int = field(default=128, metadata=Key.BOTH | between(1, 4096))
    """Elements per scale. Tensors that it does not divide keep unquantised moments."""


@dataclass
class Lion(Optimizer):
    """Lion: the sign of an interpolated momentum (arXiv:2302.06675)."""

    beta1: float = field(default=0.9, metadata=Key.LEARNING | below(0, 1))
    """Share of the momentum in the update."""
    beta2: float = field(default=0.99, metadata=Key.LEARNING | below(0, 1))
    """Decay of the momentum."""


@dataclass
class Lion8bit(Lion):
    """bitsandbytes' Lion with an 8-bit momentum and a scale per block of 256 elements."""

    min_8bit_size: int = field(default=4096, metadata=Key.BOTH | at_least(0))
    """Minimum elements of a tensor with 8-bit state. Smaller tensors keep 32-bit state."""
    embeddings_32bit: bool = field(default=True, metadata=Key.BOTH)
    """Keep a 32-bit momentum for embeddings."""


class AdjustLR(Enum):
    """Scaling of Muon's learning rate by the shape of a matrix, with torch's names."""

    original = "original"
    match_rms_adamw = "match_rms_adamw"


@dataclass
class Muon(AdamW):
    """torch's Muon for matrices of Transformer layers, and AdamW for all other weights."""

    momentum: float = field(default=0.95, metadata=Key.SWITCHED | below(0, 1))
    """Decay of the momentum. sgd: 0 keeps no optimizer state."""
    nesterov: bool = field(default=True, metadata=Key.LEARNING)
    """Use Nesterov momentum."""
    ns_steps: int = field(default=5, metadata=Key.BOTH | between(1, 99))
    """Number of Newton-Schulz iterations per step."""
    adjust_lr: AdjustLR = field(default=AdjustLR.match_rms_adamw, metadata=Key.LEARNING)
    """Scaling of the learning rate by the shape of a matrix. match_rms_adamw: updates have the size
    of AdamW's, so AdamW's learning rate and decay apply (arXiv:2502.16982, section 2.2). original:
    sqrt(max(1, rows / columns))."""
    adamw_lr: float | None = field(default=None, metadata=Key.LEARNING | above(0, _MAX_LR))
    """Peak learning rate of weights that AdamW updates. null: `lr`."""


@dataclass
class ScheduleFree(AdamW):
    """Schedule-Free AdamW (arXiv:2405.15682): an average of weights instead of a schedule."""

    beta1: float = field(
        default=0.9, metadata=Key.LEARNING | {"limit": Limit(0, 1, low_open=True, high_open=True)}
    )
    """Share of the average in the weights that compute gradients."""
    average_power: float = field(default=0.0, metadata=Key.LEARNING | at_least(0))
    """Exponent of the step in the average's weight (r in the paper)."""
    lr_power: float = field(default=2.0, metadata=Key.LEARNING | at_least(0))
    """Exponent of the largest learning rate in the average's weight."""


@dataclass
class GaLore(AdamW):
    """AdamW on gradients projected to their leading singular vectors (arXiv:2403.03507)."""

    rank: int | None = field(default=None, metadata=Key.BOTH | at_least(1))
    """Rank of the projection of matrices inside layers. null: a quarter of the width."""
    update_proj_gap: int = field(default=200, metadata=Key.BOTH | at_least(1))
    """Steps between two updates of the projection."""
    scale: float = field(default=0.25, metadata=Key.LEARNING | above(0))
    """Factor of projected updates."""


class _ScaleType(Enum):
    """Weights that share a scaling factor of APOLLO."""

    channel = "channel"
    tensor = "tensor"


@dataclass
class Apollo(AdamW):
    """SGD with the scale that a randomly projected AdamW would have (arXiv:2412.05270)."""

    rank: int | None = field(default=None, metadata=Key.BOTH | at_least(1))
    """Rank of the projection of matrices inside layers. null: a quarter of the width."""
    update_proj_gap: int = field(default=200, metadata=Key.BOTH | at_least(1))
    """Steps between two updates of the projection."""
    scale: float = field(default=1.0, metadata=Key.LEARNING | above(0))
    """Scale of updates (apollo: its square root). APOLLO-Mini has 128 with rank 1."""
    scale_type: _ScaleType = field(default=_ScaleType.channel, metadata=Key.BOTH)
    """Weights that share a scaling factor. tensor: as in APOLLO-Mini."""


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
"""Schema name -> class. Other options have the fields of `Optimizer`."""


@dataclass
class Schedule(OptionGroup):
    """Learning rate over steps."""

    option: str = "cosine"
    warmup_steps: int | None = field(default=None, metadata=Key.LEARNING | at_least(0))
    """Steps of linear warm-up. null: from `warmup_frac`."""
    warmup_frac: float = field(default=0.05, metadata=Key.LEARNING | between(0, 1))
    """Linear warm-up as a share of the run."""


@dataclass
class DecayingSchedule(Schedule):
    """Schedule that ends below its peak."""

    final_frac: float = field(default=0.0, metadata=Key.LEARNING | between(0, 1))
    """Final learning rate as a share of the peak."""


@dataclass
class WSDSchedule(DecayingSchedule):
    """Warm-up, stable, decay (Hu et al. 2024, arXiv:2404.06395)."""

    decay_frac: float = field(default=0.2, metadata=Key.LEARNING | between(0, 1))
    """Share of the run spent on the final linear decay."""
