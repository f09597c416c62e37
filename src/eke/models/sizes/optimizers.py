"""Optimizer registry: one entry per option of the group `optimizer`, without torch.

Bytes follow the libraries' code, without scalar step counters. Temporary bytes are multiples of the
largest tensor or of all tensors, as profiled on a CPU (notes/lab/memory.md) and read from the code.
If a GPU kernel needs none, the low end is 0.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import cast

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.plugins import OPTIMIZER_BUILDERS, load_plugin
from eke.config import schema
from eke.config.schema import Config, Optimizer
from eke.models.families import FLOAT32_BYTES, Role, Weight


def projection_rank(config: Config) -> int:
    """Return the rank of GaLore and APOLLO: the configured one, or a quarter of the hidden size."""
    rank = cast(schema.GaLore | schema.Apollo, config.optimizer).rank
    # A quarter is the default of APOLLO: arXiv:2412.05270, section 5.1.
    return rank or max(1, config.model.hidden_size // 4)


def optimizer_bytes(
    config: Config,
    weights: Iterable[Weight],
    bytes_of: Callable[[Weight], int] = lambda weight: FLOAT32_BYTES,
) -> int:
    """Return the bytes of an optimizer's state for trained weights of `bytes_of` per number."""
    kept, trained = optimizer_entry(config.optimizer), list(weights)
    own = sum(kept.state_bytes(config, weight, bytes_of(weight)) for weight in trained)
    shared = any(quantises_state(config.optimizer, weight) for weight in trained)
    return own + shared * kept.num_tables * 256 * FLOAT32_BYTES  # values of 8-bit codes


def paged_bytes(config: Config, weights: Iterable[Weight]) -> int:
    """Return the bytes of paged state of a paging optimizer: moments, without scales."""
    # The driver moves pages between GPU and host memory. PyTorch does not reserve memory for them.
    paged = [weight for weight in weights if prod(weight.shape) >= PAGED_MIN_SIZE]
    widths = (1 if quantises_state(config.optimizer, w) else FLOAT32_BYTES for w in paged)
    return sum(2 * width * prod(w.shape) for width, w in zip(widths, paged, strict=True))


PAGED_MIN_SIZE = 100_000
"""Smallest parameter with paged states, in numbers (bitsandbytes, get_state_buffer)."""


def quantises_state(optimizer: Optimizer, weight: Weight) -> bool:
    """Return whether an optimizer quantizes its states of this weight."""
    quantises = optimizer_entry(optimizer).quantises
    return quantises is not None and quantises(optimizer, weight)


def _quantised_by_bitsandbytes(optimizer: Optimizer, weight: Weight) -> bool:
    fields = cast(schema.AdamW8bit | schema.Lion8bit, optimizer)
    in_32_bits = fields.embeddings_32bit and weight.place is Role.embedding
    return prod(weight.shape) >= fields.min_8bit_size and not in_32_bits


def _quantised_by_torchao(optimizer: Optimizer, weight: Weight) -> bool:
    block = cast(schema.AdamWTorchAO8bit | schema.AdamWTorchAO4bit, optimizer).block_size
    num = prod(weight.shape)
    return num >= 4096 and num % block == 0  # torchao 0.18, optim/adam.py, _new_buffer


def _adamw(config: Config, weight: Weight, weight_bytes: int) -> int:
    """Count two moments as large as the parameter (Schedule-Free: a moment and fast weights)."""
    return 2 * weight_bytes * prod(weight.shape)


def _bitsandbytes_state(config: Config, weight: Weight, weight_bytes: int, *, moments: int) -> int:
    """Count a byte per number and a scale per block, or float32 numbers."""
    num = prod(weight.shape)
    if not quantises_state(config.optimizer, weight):
        return moments * FLOAT32_BYTES * num
    # 256 numbers per scale: bitsandbytes 0.50, optim/optimizer.py, init_state.
    return moments * (num + FLOAT32_BYTES * -(-num // 256))


def _torchao_state(config: Config, weight: Weight, weight_bytes: int, *, bits: int) -> int:
    """Count codes, a scale per block and a table of values, for each moment of each tensor."""
    if not quantises_state(config.optimizer, weight):
        return _adamw(config, weight, weight_bytes)
    num = prod(weight.shape)
    block = cast(schema.AdamWTorchAO8bit | schema.AdamWTorchAO4bit, config.optimizer).block_size
    codes, scales = num * bits // 8, FLOAT32_BYTES * (num // block)
    return 2 * (codes + scales + FLOAT32_BYTES * (1 << bits))


def _adafactor(config: Config, weight: Weight, weight_bytes: int) -> int:
    """Count sums of rows and columns of a matrix, or an entire vector, in float32."""
    # Source: transformers.optimization.Adafactor (beta1=None); arXiv:1804.04235, section 4.
    shape = weight.shape
    if len(shape) < 2:
        return FLOAT32_BYTES * prod(shape)
    return FLOAT32_BYTES * (prod(shape[:-1]) + prod(shape[:-2] + shape[-1:]))


def _sgd(config: Config, weight: Weight, weight_bytes: int) -> int:
    """Count the momentum buffer, which torch does not create for momentum 0."""
    return weight_bytes * prod(weight.shape) if cast(schema.SGD, config.optimizer).momentum else 0


def _muon(config: Config, weight: Weight, weight_bytes: int) -> int:
    """Count one momentum for matrices inside layers, two moments for other weights."""
    return (1 if weight.role is Role.hidden else 2) * weight_bytes * prod(weight.shape)


def _low_rank_state(config: Config, weight: Weight, weight_bytes: int, *, by_vectors: bool) -> int:
    """Count two moments of long side x rank, and a projection of rank x short side.

    The short side limits the rank of singular vectors (`by_vectors`, GaLore), but not the rank of a
    random projection (APOLLO).
    """
    if weight.role is not Role.hidden:
        return _adamw(config, weight, weight_bytes)
    long, short, rank = max(weight.shape), min(weight.shape), projection_rank(config)
    return weight_bytes * (min(rank, short) if by_vectors else rank) * (2 * long + short)


def _newton_schulz(config: Config, rows: int, columns: int) -> float:
    """Count X X^T, its square, and their sum times X, in each iteration."""
    # Source: torch.optim.Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon).
    steps = cast(schema.Muon, config.optimizer).ns_steps
    return steps * (4.0 * rows * rows * columns + 2.0 * rows**3)


def _project(config: Config, rows: int, columns: int, *, times: int) -> float:
    """Count the projection into the subspace and, with `times` 2, back from it."""
    return 2.0 * times * projection_rank(config) * rows * columns


@dataclass(frozen=True)
class UpdateSizes:
    """Bytes of trained tensors in one optimizer step.

    `largest` is for one tensor, `group` for one role, `hidden` for a matrix inside a layer,
    `in_8_bits` for a tensor with quantized states, `total` for all, `number_bytes` for one number.
    """

    optimizer: Optimizer
    largest: int
    group: int
    total: int
    hidden: int
    in_8_bits: int
    number_bytes: int
    on_cpu: bool

    @property
    def wide(self) -> int:
        """Size of a float32 copy relative to the tensor."""
        return FLOAT32_BYTES // self.number_bytes


_Temporaries = Callable[[UpdateSizes], tuple[int, int]]
"""Function of a step to its expected and largest temporary bytes. The smallest are 0."""


def unknown_temporaries(step: UpdateSizes) -> tuple[int, int]:
    """Return the range for optimizers without a formula: 0 to twice all tensors."""
    return step.largest, 2 * step.total


def _one_kernel(step: UpdateSizes) -> tuple[int, int]:
    """Return the range for kernels without known temporaries."""
    return 0, step.largest


LOOPS: dict[str, _Temporaries] = {
    # _multi_tensor_adamw of torch computes the square roots of a group's second moments together.
    "foreach": lambda step: (step.group, step.group + step.largest),
    "forloop": lambda step: (2 * step.largest, 3 * step.largest),
    "fused": _one_kernel,
    "deepspeed_cpu": _one_kernel,
}
"""Planned implementation of torch's AdamW -> temporaries of one step."""


def _adafactor_step(step: UpdateSizes) -> tuple[int, int]:
    """Count the squared gradient, the update and, for 16-bit weights, two copies."""
    copies = 2 if step.wide == 1 else 4
    expected = (copies * step.largest + step.hidden) * step.wide
    return expected, (copies + 2) * step.largest * step.wide


def _sgd_step(step: UpdateSizes) -> tuple[int, int]:
    """Count decayed gradients: of one tensor on a CPU, of a group (foreach) on a GPU."""
    fields = cast(schema.SGD, step.optimizer)
    size = step.largest if step.on_cpu else step.group
    return size if fields.weight_decay or fields.nesterov else 0, step.group + step.largest


def bitsandbytes(step: UpdateSizes) -> tuple[int, int]:
    """Return the range of bitsandbytes 0.50: one kernel on a GPU, plain PyTorch on a CPU."""
    # Source: backends/cpu/ops.py. In float32: gradient, denominator and update, with 8 bits also
    # two moments (Lion: a moment and a product), and a copy of narrow weights.
    if not step.on_cpu:
        return 0, step.largest
    copy = 0 if step.wide == 1 else 1
    at_once = max((3 + copy) * step.largest, (5 + copy) * step.in_8_bits) * step.wide
    return at_once, (6 + copy) * step.largest * step.wide


def _muon_step(step: UpdateSizes) -> tuple[int, int]:
    """Count Newton-Schulz iterations of one matrix in bfloat16."""
    narrowed = 1 if step.number_bytes > 2 else 2
    return 3 * step.hidden * narrowed, 6 * step.hidden * step.wide + step.largest


AUTO = "auto"
"""Value of `implementation` that leaves the choice to the plan."""


@dataclass(frozen=True)
class OptimizerEntry:
    """Facts about one option. Defaults are assumptions for entries that omit a fact."""

    builder: str
    """`module:attribute` of a function (plan, parameter groups) -> torch optimizer."""
    state_bytes: Callable[[Config, Weight, int], int]
    """Bytes of state of one weight. The last argument is the weight's bytes per number."""

    package: str = ""
    """Required package in addition to PyTorch and transformers."""
    install: str = ""
    built: tuple[str, ...] = ()
    """Accepted classes and libraries of the built optimizer, empty: its states are checked."""
    implementation: str = ""
    """Loop over the weights in torch's AdamW (`AUTO`: planned), "" for other optimizers."""
    temporaries: _Temporaries = unknown_temporaries
    """Temporary bytes of one step. For torch's AdamW they depend on the implementation."""
    update_flops: Callable[[Config, int, int], float] | None = None
    """FLOPs of the products in an update of a matrix inside a layer, rows <= columns."""
    counted_as: str = ""
    """Option with about the same bytes and launches, for options that a trace does not show."""
    not_timed: str = ""
    """Part of a step that an estimate of its time excludes, in one clause."""
    twin: str = ""
    """PyTorch option with the same computation, which is traced instead."""
    quantises: Callable[[Optimizer, Weight], bool] | None = None
    """True if the states of a weight are quantized, None for optimizers without quantization."""
    num_tables: int = 0
    """Tables of the values of 8-bit codes that all weights share."""
    unquantised: str = "adamw"
    """Option with the same states in float32, for an option with quantized states."""
    projects: bool = False
    """True if states of a matrix inside a layer are in a subspace of `projection_rank`."""
    keeps_singular_vectors: bool = False
    """True if all singular vectors of a matrix stay allocated, since a slice of them is used."""
    cuda_only: bool = False
    compiles: bool = False
    """True if the first step is compiled, with a C++ compiler or, on a GPU, Triton."""
    pages: bool = False
    """True if states move to host memory if GPU memory is full."""
    stochastic_rounding: bool = False
    """True if bfloat16 weights are rounded stochastically, so that small updates accumulate."""
    averages: bool = False
    """True if an average of weights replaces a learning rate schedule."""
    steps_like_adamw: Callable[[Optimizer], bool] = lambda optimizer: False
    """True if updates are about as large as those by AdamW with the same learning rate."""
    needs_matrices: bool = False
    """True if the optimizer requires a trained matrix inside a layer."""
    fails_on_fsdp: str = ""
    """Failure on FSDP2's shards, "" if it works (tests/equivalence/test_ranks.py)."""
    fails_on_zero: str = ""
    """Failure on ZeRO's flat shards, "" if the loss curve equals the curve without ZeRO."""
    # Apex's FusedAdam was not tested (it needs a GPU). DeepSpeed lists it in runtime/zero/utils.py.
    fails_in_backward: str = ""
    """Failure of steps weight by weight, "" if it works (tests/equivalence/test_in_backward.py)."""
    returns_from_files: bool = False
    """True if moments return unchanged from NVMe files (8-bit states do not: scales are lost)."""


_MIXED = "(torch: got mixed torch.Tensor and DTensor)"
_WHOLE = (
    "bitsandbytes' kernels need full tensors (torch: Operator "
    "bitsandbytes.optimizer_update_32bit.default does not have a sharding strategy registered)"
)
ZERO_FLAT_SHARDS_REASON = "ZeRO gives it flat shards"
_COUNTS = "counts steps per group of weights, and would count one step for each weight"
_BUILDERS = f"{OPTIMIZER_BUILDERS}:"

_adamw_sized = partial(OptimizerEntry, steps_like_adamw=lambda optimizer: True)

_torch_adamw = partial(
    _adamw_sized,
    builder=f"{_BUILDERS}adamw",
    state_bytes=_adamw,
    built=("AdamW torch",),
    returns_from_files=True,
)

_bitsandbytes = partial(
    OptimizerEntry,
    package="bitsandbytes",
    install='pip install "eke[bitsandbytes]"',
    temporaries=bitsandbytes,
    fails_on_fsdp=_WHOLE,
)

_adamw_bitsandbytes = partial(
    _bitsandbytes,
    builder=f"{_BUILDERS}eight_bit",
    state_bytes=partial(_bitsandbytes_state, moments=2),
    quantises=_quantised_by_bitsandbytes,
    num_tables=2,
    steps_like_adamw=lambda optimizer: True,
)

_torchao = partial(
    _adamw_sized,
    package="torchao",
    install='pip install "eke[torchao]"',
    # The step is compiled for one tensor at a time, at worst with moments in float32.
    temporaries=lambda step: (step.largest * step.wide, 6 * step.largest * step.wide),
    compiles=True,
)

_adamw_torchao = partial(
    _torchao,
    builder=f"{_BUILDERS}adamw_torchao",
    quantises=_quantised_by_torchao,
    counted_as="adamw_8bit",
    fails_on_zero=f"{ZERO_FLAT_SHARDS_REASON}, and it silently keeps float32 states for "
    "incomplete blocks",
)

_low_rank = partial(
    OptimizerEntry,
    projects=True,
    # AdamW for one tensor, projections, and singular vectors of one matrix in float32.
    temporaries=lambda step: (
        2 * step.largest + step.hidden,
        4 * step.largest + 8 * step.hidden * step.wide,
    ),
    fails_on_fsdp=f"it projects full matrices {_MIXED}",
    fails_on_zero=f"projects matrices, and {ZERO_FLAT_SHARDS_REASON} "
    "(IndexError: tuple index out of range)",
)

OPTIMIZER_REGISTRY: dict[str, OptimizerEntry] = {
    "adamw": _torch_adamw(built=("AdamW torch", "DeepSpeedCPUAdam deepspeed"), implementation=AUTO),
    **{
        f"adamw_{loop}": _torch_adamw(implementation=loop)
        for loop in ("forloop", "foreach", "fused")
    },
    "adamw_apex_fused": _adamw_sized(
        builder=f"{_BUILDERS}adamw_apex_fused",
        state_bytes=_adamw,
        package="apex.optimizers",
        install="build it from github.com/NVIDIA/apex (apex on PyPI is another project)",
        built=("FusedAdam apex",),
        temporaries=_one_kernel,
        counted_as="adamw_fused",
        twin="adamw_fused",
        cuda_only=True,
        fails_on_fsdp="apex's kernels need full tensors",
        fails_in_backward=_COUNTS,
    ),
    "adamw_8bit": _adamw_bitsandbytes(),
    "paged_adamw_8bit": _adamw_bitsandbytes(
        counted_as="adamw_8bit",
        not_timed="paged states: time for paging is not included",
        pages=True,
    ),
    "lion": _bitsandbytes(
        builder=f"{_BUILDERS}lion",
        state_bytes=partial(_bitsandbytes_state, moments=1),
        built=("Lion bitsandbytes",),
        returns_from_files=True,
    ),
    "lion_8bit": _bitsandbytes(
        builder=f"{_BUILDERS}eight_bit",
        state_bytes=partial(_bitsandbytes_state, moments=1),
        quantises=_quantised_by_bitsandbytes,
        num_tables=1,
        unquantised="lion",
    ),
    "adamw_torchao_8bit": _adamw_torchao(
        state_bytes=partial(_torchao_state, bits=8),
        fails_on_fsdp="its quantized shards cannot be loaded from a checkpoint "
        "(torch: Weights only load failed)",
    ),
    "adamw_torchao_4bit": _adamw_torchao(
        state_bytes=partial(_torchao_state, bits=4),
        fails_on_fsdp="its 4-bit states are flat, but its compiled step needs matrices "
        "(torch: wrong number of dimensions)",
    ),
    "adamw_bf16_sr": _torchao(
        builder=f"{_BUILDERS}adamw_bf16_sr",
        state_bytes=_adamw,
        counted_as="adamw_fused",
        stochastic_rounding=True,
        # Two processes deviated from float32 copies as far as one. Uneven shards were not tested.
        fails_on_fsdp="every process would use the same random numbers for its shard",
        fails_on_zero="rounds bfloat16 weights stochastically, but ZeRO updates float32 copies",
        fails_in_backward="would use the same random numbers for every weight of a step",
    ),
    "adafactor": _adamw_sized(
        builder=f"{_BUILDERS}adafactor",
        state_bytes=_adafactor,
        built=("Adafactor transformers",),
        temporaries=_adafactor_step,
        fails_on_fsdp=f"it needs sums over the rows and columns of full matrices {_MIXED}",
        fails_on_zero=f"needs rows and columns of matrices. {ZERO_FLAT_SHARDS_REASON}, and it "
        "silently becomes another algorithm with 4 bytes per parameter",
    ),
    "custom": OptimizerEntry(
        builder=f"{_BUILDERS}custom",
        state_bytes=lambda config, weight, weight_bytes: 0,  # a trace has its state
    ),
    "sgd": OptimizerEntry(
        builder=f"{_BUILDERS}sgd",
        state_bytes=_sgd,
        built=("SGD torch",),
        temporaries=_sgd_step,
        returns_from_files=True,
    ),
    "muon": OptimizerEntry(
        builder=f"{_BUILDERS}muon",
        state_bytes=_muon,
        update_flops=_newton_schulz,
        built=("Muon+AdamW torch", "Muon torch"),
        temporaries=_muon_step,
        steps_like_adamw=lambda o: cast(schema.Muon, o).adjust_lr.value == "match_rms_adamw",
        needs_matrices=True,
        fails_on_zero=f"orthogonalizes matrices, but {ZERO_FLAT_SHARDS_REASON} "
        "(torch: Param gradient must be a 2D matrix)",
    ),
    "schedule_free": OptimizerEntry(
        builder=f"{_BUILDERS}schedule_free",
        state_bytes=_adamw,
        package="schedulefree",
        install='pip install "eke[schedulefree]"',
        built=("AdamWScheduleFree schedulefree",),
        # The library's foreach loop normalizes all gradients together.
        temporaries=lambda step: (step.total, 2 * step.total),
        averages=True,
        fails_on_zero="evaluates and saves an average, which does not reach the model from "
        "ZeRO's shards",
        fails_in_backward=_COUNTS,
    ),
    "galore": _low_rank(
        builder=f"{_BUILDERS}galore",
        state_bytes=partial(_low_rank_state, by_vectors=True),
        keeps_singular_vectors=True,
        update_flops=partial(_project, times=2),
        package="galore_torch",
        install='pip install "eke[galore]"',
        not_timed="galore: its decompositions every few hundred steps are not included",
    ),
    "apollo": _low_rank(
        builder=f"{_BUILDERS}apollo",
        state_bytes=partial(_low_rank_state, by_vectors=False),
        update_flops=partial(_project, times=1),
        package="apollo_torch",
        install='pip install "eke[apollo]"',
        counted_as="galore",
    ),
}
"""Option -> entry. Other packages add entries by the entry point group `eke.optimizers`."""


def option_of(optimizer: Optimizer) -> str:
    """Return the option with the same effect without `optimizer.implementation`: `adamw_fused`."""
    if optimizer.option != "adamw" or not isinstance(optimizer, schema.TorchAdamW):
        return optimizer.option
    name = optimizer.implementation.value
    return {AUTO: "adamw", "apex": "adamw_apex_fused"}.get(name, f"adamw_{name}")


def optimizer_entry(optimizer: Optimizer) -> OptimizerEntry:
    """Return the entry of an optimizer; ConfigError if no installed package has one."""
    option = option_of(optimizer)
    entry = OPTIMIZER_REGISTRY.get(option) or load_plugin("eke.optimizers", option)
    if entry is None:
        why = "is not registered by any package (entry point group eke.optimizers)"
        fix = Fix("optimizer=adamw")
        raise ConfigError(Problem("optimizer", option, why, fix, "missing_plugin"))
    assert isinstance(entry, OptimizerEntry), f"eke.optimizers: {option} is not an OptimizerEntry"
    return entry
