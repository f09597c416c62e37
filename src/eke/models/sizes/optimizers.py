"""Optimizer registry: one entry for each option of the group `optimizer`; no torch.

Bytes are those of the libraries' own code; scalar step counters are not counted. Temporaries are
multiples of the largest tensor, or of all, as profiled on a CPU (docs/lab/memory.md) and read from
each library; where a GPU's kernels need none, the low end is 0.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import cast

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.plugins import load_plugin
from eke.config.schema import (
    SGD,
    AdamW8bit,
    AdamWTorchAO4bit,
    AdamWTorchAO8bit,
    Apollo,
    Config,
    GaLore,
    Lion8bit,
    Muon,
    Optimizer,
    TorchAdamW,
)
from eke.models.families import FLOAT32_BYTES, Role, Weight


def projection_rank(config: Config) -> int:
    """Rank of GaLore's and APOLLO's projections: the configured one, or a quarter of the width."""
    rank = cast(GaLore | Apollo, config.optimizer).rank
    # A quarter is APOLLO's own default: arXiv:2412.05270, section 5.1.
    return rank or max(1, config.model.hidden_size // 4)


def optimizer_bytes(
    config: Config,
    weights: Iterable[Weight],
    bytes_of: Callable[[Weight], int] = lambda weight: FLOAT32_BYTES,
) -> int:
    """Bytes of an optimizer's state for these trained weights, of so many bytes per number."""
    kept, trained = optimizer_entry(config.optimizer), list(weights)
    own = sum(kept.state_bytes(config, weight, bytes_of(weight)) for weight in trained)
    shared = any(quantises_state(config.optimizer, weight) for weight in trained)
    return own + shared * kept.num_tables * 256 * FLOAT32_BYTES  # what codes of 8 bits stand for


def paged_bytes(config: Config, weights: Iterable[Weight]) -> int:
    """Bytes of the state in paged memory, for an optimizer that pages: moments, without scales."""
    # The driver moves pages between a GPU's memory and the host's; PyTorch reserves none for them.
    paged = [weight for weight in weights if prod(weight.shape) >= PAGED_MIN_SIZE]
    widths = (1 if quantises_state(config.optimizer, w) else FLOAT32_BYTES for w in paged)
    return sum(2 * width * prod(w.shape) for width, w in zip(widths, paged, strict=True))


PAGED_MIN_SIZE = 100_000
"""Numbers of a parameter from which on its states are paged (bitsandbytes, get_state_buffer)."""


def quantises_state(optimizer: Optimizer, weight: Weight) -> bool:
    """Whether an optimizer that quantises does so for this weight."""
    quantises = optimizer_entry(optimizer).quantises
    return quantises is not None and quantises(optimizer, weight)


def _quantised_by_bitsandbytes(optimizer: Optimizer, weight: Weight) -> bool:
    fields = cast(AdamW8bit | Lion8bit, optimizer)
    in_32_bits = fields.embeddings_32bit and weight.place is Role.embedding
    return prod(weight.shape) >= fields.min_8bit_size and not in_32_bits


def _quantised_by_torchao(optimizer: Optimizer, weight: Weight) -> bool:
    num, block = prod(weight.shape), cast(AdamWTorchAO8bit | AdamWTorchAO4bit, optimizer).block_size
    return num >= 4096 and num % block == 0  # torchao 0.18, optim/adam.py, _new_buffer


BITSANDBYTES_BLOCK = 256
"""bitsandbytes 0.50, optim/optimizer.py, init_state."""


def _adamw(config: Config, weight: Weight, weight_bytes: int) -> int:
    """Two moments as large as the parameter; Schedule-Free has one, and fast weights."""
    return 2 * weight_bytes * prod(weight.shape)


def _bitsandbytes_state(config: Config, weight: Weight, weight_bytes: int, *, moments: int) -> int:
    """A byte per number and a scale per block, or float32."""
    num = prod(weight.shape)
    if not quantises_state(config.optimizer, weight):
        return moments * FLOAT32_BYTES * num
    return moments * (num + FLOAT32_BYTES * -(-num // BITSANDBYTES_BLOCK))


def _torchao_state(config: Config, weight: Weight, weight_bytes: int, *, bits: int) -> int:
    """Codes, a scale per block, and a table of values for each moment of each tensor."""
    if not quantises_state(config.optimizer, weight):
        return _adamw(config, weight, weight_bytes)
    num = prod(weight.shape)
    block = cast(AdamWTorchAO8bit | AdamWTorchAO4bit, config.optimizer).block_size
    codes, scales = num * bits // 8, FLOAT32_BYTES * (num // block)
    return 2 * (codes + scales + FLOAT32_BYTES * (1 << bits))


def _adafactor(config: Config, weight: Weight, weight_bytes: int) -> int:
    """Rows and columns of a matrix, all of a vector, no first moment; float32 for any weights."""
    # transformers.optimization.Adafactor (beta1=None); arXiv:1804.04235, section 4
    shape = weight.shape
    if len(shape) < 2:
        return FLOAT32_BYTES * prod(shape)
    return FLOAT32_BYTES * (prod(shape[:-1]) + prod(shape[:-2] + shape[-1:]))


def _sgd(config: Config, weight: Weight, weight_bytes: int) -> int:
    """The momentum buffer; torch makes none at momentum 0."""
    return weight_bytes * prod(weight.shape) if cast(SGD, config.optimizer).momentum else 0


def _muon(config: Config, weight: Weight, weight_bytes: int) -> int:
    """One momentum for a matrix inside a layer, AdamW's two moments elsewhere."""
    return (1 if weight.role is Role.hidden else 2) * weight_bytes * prod(weight.shape)


def _low_rank_state(config: Config, weight: Weight, weight_bytes: int, *, by_vectors: bool) -> int:
    """Two moments of long side x rank, and a projection of rank x short side.

    A matrix has at most as many singular vectors as its shorter side is long (`by_vectors`,
    GaLore); a random projection has its rank even where the matrix has less (APOLLO).
    """
    if weight.role is not Role.hidden:
        return _adamw(config, weight, weight_bytes)
    long, short, rank = max(weight.shape), min(weight.shape), projection_rank(config)
    return weight_bytes * (min(rank, short) if by_vectors else rank) * (2 * long + short)


def _newton_schulz(config: Config, rows: int, columns: int) -> float:
    """In each iteration X X^T, its square, and their sum times X."""
    # torch.optim.Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon)
    iterations = cast(Muon, config.optimizer).ns_steps
    return iterations * (4.0 * rows * rows * columns + 2.0 * rows**3)


def _project(config: Config, rows: int, columns: int, *, times: int) -> float:
    """Into the subspace, and back from it where it is done twice."""
    return 2.0 * times * projection_rank(config) * rows * columns


@dataclass(frozen=True)
class Step:
    """What an optimizer steps on, in bytes, as it sees the tensors."""

    optimizer: Optimizer
    largest: int
    """The largest trained tensor."""
    group: int
    """The largest group of one role."""
    total: int
    """All of them."""
    hidden: int
    """The largest matrix of a layer."""
    in_8_bits: int
    """The largest tensor whose states are quantised."""
    number_bytes: int
    """Of one number of a tensor."""
    on_cpu: bool
    """It runs on a CPU."""

    @property
    def wide(self) -> int:
        """How much larger a float32 copy is."""
        return FLOAT32_BYTES // self.number_bytes


Temporaries = Callable[[Step], tuple[int, int]]
"""A step -> the expected bytes, and the most; the least are none."""


def unknown(step: Step) -> tuple[int, int]:
    """Nothing up to everything twice."""
    return step.largest, 2 * step.total


def one_kernel(step: Step) -> tuple[int, int]:
    """None that is known of."""
    return 0, step.largest


LOOPS: dict[str, Temporaries] = {
    # Torch's _multi_tensor_adamw has the square roots of a group's second moments at once.
    "foreach": lambda step: (step.group, step.group + step.largest),
    # Of one tensor after the other.
    "forloop": lambda step: (2 * step.largest, 3 * step.largest),
    "fused": one_kernel,
    "deepspeed_cpu": one_kernel,
}
"""Implementation of torch's AdamW, as planned -> temporaries of one step."""


def adafactor_step(step: Step) -> tuple[int, int]:
    """The squared gradient, the update and, of narrow weights, two copies (transformers')."""
    copies = 2 if step.wide == 1 else 4
    expected = (copies * step.largest + step.hidden) * step.wide
    return expected, (copies + 2) * step.largest * step.wide


def sgd_step(step: Step) -> tuple[int, int]:
    """Decayed gradients: of one tensor on a CPU, of a group at once (foreach) on a GPU."""
    fields = cast(SGD, step.optimizer)
    size = step.largest if step.on_cpu else step.group
    return size if fields.weight_decay or fields.nesterov else 0, step.group + step.largest


def bitsandbytes(step: Step) -> tuple[int, int]:
    """One kernel on a GPU; bitsandbytes 0.50 computes in plain PyTorch on a CPU.

    Source: backends/cpu/ops.py. In 32 bits the gradient, a denominator and the update; in 8 bits
    two moments besides (Lion: one, and a product), all float32; of narrow weights a copy, too.
    """
    if not step.on_cpu:
        return 0, step.largest
    copy = 0 if step.wide == 1 else 1
    at_once = max((3 + copy) * step.largest, (5 + copy) * step.in_8_bits) * step.wide
    return at_once, (6 + copy) * step.largest * step.wide


def muon_step(step: Step) -> tuple[int, int]:
    """Newton-Schulz iterations of one matrix in bfloat16; AdamW's kernel has no temporaries."""
    narrowed = 1 if step.number_bytes > 2 else 2
    return 3 * step.hidden * narrowed, 6 * step.hidden * step.wide + step.largest


AUTO = "auto"
"""Of `implementation`: the plan chooses."""


@dataclass(frozen=True)
class OptimizerEntry:
    """Facts about one option; a default is the assumption for what an entry does not say."""

    builder: str
    """`module:attribute` of the function (plan, parameter groups) -> torch optimizer."""
    state_bytes: Callable[[Config, Weight, int], int]
    """Bytes of state of one weight, of so many bytes per number."""

    package: str = ""
    """Required packages, in addition to PyTorch and transformers."""
    install: str = ""
    """The line that installs it."""
    built: tuple[str, ...] = ()
    """Class and library of what may be built; empty where an effect shows in its states."""
    implementation: str = ""
    """Loop over the weights that the option names, of torch's AdamW; `AUTO` leaves it to the plan,
    and none is another optimizer's own."""

    temporaries: Temporaries = unknown
    """Temporary bytes of one step; for torch's AdamW they depend on its implementation."""
    update_flops: Callable[[Config, int, int], float] | None = None
    """FLOPs of the products in an update of a matrix inside a layer, rows <= columns."""
    counted_as: str = ""
    """Option whose bytes and launches stand in for its own, which no trace shows: it compiles
    itself, or is another library's kernel."""
    not_timed: str = ""
    """What an estimate of a step's time leaves out, in one clause."""

    twin: str = ""
    """Option of PyTorch's own that computes the same and is traced in its place."""
    quantises: Callable[[Optimizer, Weight], bool] | None = None
    """Whether the states of a weight are quantised; None where none ever is."""
    num_tables: int = 0
    """Tables of the values of 8 bits that all weights share."""
    unquantised: str = "adamw"
    """Option that keeps the same states in float32, where its own are quantised."""
    projects: bool = False
    """The states of a matrix inside a layer lie in a subspace, of `projection_rank`."""
    keeps_singular_vectors: bool = False
    """All of a projected matrix, of which its projection is a slice."""
    cuda_only: bool = False
    """Its library has no kernels for a CPU."""
    compiles: bool = False
    """It compiles its step at first use: with a C++ compiler, or Triton on a GPU."""
    pages: bool = False
    """States may wait in the host's memory when a GPU's is short."""
    rounds_at_random: bool = False
    """Of bfloat16 weights, so that small updates add up."""
    averages: bool = False
    """Trains an average of weights in place of a schedule."""
    steps_like_adamw: Callable[[Optimizer], bool] = lambda optimizer: False
    """Whether AdamW's learning rates make updates about as large as AdamW's."""
    needs_matrices: bool = False
    """There is nothing to do for it where no matrix inside a layer is trained."""

    fails_on_parts: str = ""
    """What goes wrong on FSDP2's parts of tensors; empty where nothing does
    (tests/equivalence/test_ranks.py)."""
    fails_on_pieces: str = ""
    """What goes wrong on ZeRO's flat pieces; empty where it gave the same curve as without ZeRO.
    Apex's needs a GPU and was not tried: it is on DeepSpeed's own list (runtime/zero/utils.py)."""
    fails_in_backward: str = ""
    """What goes wrong when it steps weight by weight (tests/equivalence/test_in_backward.py)."""
    returns_from_files: bool = False
    """Its moments were seen to come back from files as they went. States of 8 bits do not:
    DeepSpeed reads what it takes for moments, and not the scales of their blocks."""


MIXED = "(torch: got mixed torch.Tensor and DTensor)"
WHOLE = (
    "bitsandbytes' kernels take whole tensors (torch: Operator "
    "bitsandbytes.optimizer_update_32bit.default does not have a sharding strategy registered)"
)

PIECES = "ZeRO hands it flat pieces"

COUNTS = "counts the steps of a group of weights, which is stepped once for each of them then"

BUILDERS = "eke.training.optimizer.builders:"

_adamw_sized = partial(OptimizerEntry, steps_like_adamw=lambda optimizer: True)

_torch_adamw = partial(
    _adamw_sized,
    builder=f"{BUILDERS}adamw",
    state_bytes=_adamw,
    built=("AdamW torch",),
    returns_from_files=True,
)

_bitsandbytes = partial(
    OptimizerEntry,
    package="bitsandbytes",
    install='pip install "eke[bitsandbytes]"',
    temporaries=bitsandbytes,
    fails_on_parts=WHOLE,
)

_adamw_bitsandbytes = partial(
    _bitsandbytes,
    builder=f"{BUILDERS}eight_bit",
    state_bytes=partial(_bitsandbytes_state, moments=2),
    quantises=_quantised_by_bitsandbytes,
    num_tables=2,
    steps_like_adamw=lambda optimizer: True,
)

_torchao = partial(
    _adamw_sized,
    package="torchao",
    install='pip install "eke[torchao]"',
    # Compiled, one tensor at a time: moments in float32 at worst.
    temporaries=lambda step: (step.largest * step.wide, 6 * step.largest * step.wide),
    compiles=True,
)

_adamw_torchao = partial(
    _torchao,
    builder=f"{BUILDERS}adamw_torchao",
    quantises=_quantised_by_torchao,
    counted_as="adamw_8bit",
    fails_on_pieces=f"{PIECES} of no whole number of blocks, whose states it silently keeps in "
    "float32",
)

_low_rank = partial(
    OptimizerEntry,
    projects=True,
    # AdamW by tensor, projections, and singular vectors of one matrix in float32.
    temporaries=lambda step: (
        2 * step.largest + step.hidden,
        4 * step.largest + 8 * step.hidden * step.wide,
    ),
    fails_on_parts=f"it projects whole matrices {MIXED}",
    fails_on_pieces=f"projects matrices, and {PIECES} (IndexError: tuple index out of range)",
)

OPTIMIZER_REGISTRY: dict[str, OptimizerEntry] = {
    "adamw": _torch_adamw(built=("AdamW torch", "DeepSpeedCPUAdam deepspeed"), implementation=AUTO),
    **{
        f"adamw_{loop}": _torch_adamw(implementation=loop)
        for loop in ("forloop", "foreach", "fused")
    },
    "adamw_apex_fused": _adamw_sized(
        builder=f"{BUILDERS}adamw_apex_fused",
        state_bytes=_adamw,
        package="apex.optimizers",
        install="build it from github.com/NVIDIA/apex; the package index has another project of "
        "that name",
        built=("FusedAdam apex",),
        temporaries=one_kernel,
        counted_as="adamw_fused",
        twin="adamw_fused",
        cuda_only=True,
        fails_on_parts="apex's kernels take whole tensors",
        fails_in_backward=COUNTS,
    ),
    "adamw_8bit": _adamw_bitsandbytes(),
    "paged_adamw_8bit": _adamw_bitsandbytes(
        counted_as="adamw_8bit",
        not_timed="paged states: as if nothing had to be paged in",
        pages=True,
    ),
    "lion": _bitsandbytes(
        builder=f"{BUILDERS}lion",
        state_bytes=partial(_bitsandbytes_state, moments=1),
        built=("Lion bitsandbytes",),
        returns_from_files=True,
    ),
    "lion_8bit": _bitsandbytes(
        builder=f"{BUILDERS}eight_bit",
        state_bytes=partial(_bitsandbytes_state, moments=1),
        quantises=_quantised_by_bitsandbytes,
        num_tables=1,
        unquantised="lion",
    ),
    "adamw_torchao_8bit": _adamw_torchao(
        state_bytes=partial(_torchao_state, bits=8),
        fails_on_parts="it trains, and its quantised parts cannot be read back from a checkpoint "
        "(torch: Weights only load failed)",
    ),
    "adamw_torchao_4bit": _adamw_torchao(
        state_bytes=partial(_torchao_state, bits=4),
        fails_on_parts="its 4-bit states are flat, and its compiled step takes them for matrices "
        "(torch: wrong number of dimensions)",
    ),
    "adamw_bf16_sr": _torchao(
        builder=f"{BUILDERS}adamw_bf16_sr",
        state_bytes=_adamw,
        counted_as="adamw_fused",
        rounds_at_random=True,
        fails_on_parts="each process would draw the same random numbers for another part: on two "
        "it strayed from float32 copies as far as one does, and parts of uneven sizes have not "
        "been seen",
        fails_on_pieces="rounds bfloat16 weights at random; ZeRO steps on float32 copies",
        fails_in_backward=(
            "draws the random numbers of a step once, and the same for each weight then"
        ),
    ),
    "adafactor": _adamw_sized(
        builder=f"{BUILDERS}adafactor",
        state_bytes=_adafactor,
        built=("Adafactor transformers",),
        temporaries=adafactor_step,
        fails_on_parts=(
            f"it keeps sums over rows and columns, which a part of a matrix has not {MIXED}"
        ),
        fails_on_pieces=f"keeps a row and a column of statistics for each matrix; {PIECES}, and it "
        "silently becomes another algorithm with 4 bytes a parameter",
    ),
    "sgd": OptimizerEntry(
        builder=f"{BUILDERS}sgd",
        state_bytes=_sgd,
        built=("SGD torch",),
        temporaries=sgd_step,
        returns_from_files=True,
    ),
    "muon": OptimizerEntry(
        builder=f"{BUILDERS}muon",
        state_bytes=_muon,
        update_flops=_newton_schulz,
        built=("Muon+AdamW torch", "Muon torch"),
        temporaries=muon_step,
        steps_like_adamw=lambda o: cast(Muon, o).adjust_lr.value == "match_rms_adamw",
        needs_matrices=True,
        fails_on_pieces=(
            f"orthogonalizes matrices; {PIECES} (torch: Param gradient must be a 2D matrix)"
        ),
    ),
    "schedule_free": OptimizerEntry(
        builder=f"{BUILDERS}schedule_free",
        state_bytes=_adamw,
        package="schedulefree",
        install='pip install "eke[schedulefree]"',
        built=("AdamWScheduleFree schedulefree",),
        # A normalised gradient of everything: the library's foreach.
        temporaries=lambda step: (step.total, 2 * step.total),
        averages=True,
        fails_on_pieces="evaluates and saves an average, which it would put into ZeRO's pieces, "
        "where the model does not see it",
        fails_in_backward=COUNTS,
    ),
    "galore": _low_rank(
        builder=f"{BUILDERS}galore",
        state_bytes=partial(_low_rank_state, by_vectors=True),
        keeps_singular_vectors=True,
        update_flops=partial(_project, times=2),
        package="galore_torch",
        install='pip install "eke[galore]"',
        not_timed="galore: its decompositions, every few hundred steps, are left out",
    ),
    "apollo": _low_rank(
        builder=f"{BUILDERS}apollo",
        state_bytes=partial(_low_rank_state, by_vectors=False),
        update_flops=partial(_project, times=1),
        package="apollo_torch",
        install='pip install "eke[apollo]"',
        counted_as="galore",
    ),
}
"""Option -> its entry. Other packages add entries by the entry point group `eke.optimizers`."""


def option_of(optimizer: Optimizer) -> str:
    """The option that does the same without `optimizer.implementation`: `adamw_fused`."""
    if optimizer.option != "adamw" or not isinstance(optimizer, TorchAdamW):
        return optimizer.option
    name = optimizer.implementation.value
    return {AUTO: "adamw", "apex": "adamw_apex_fused"}.get(name, f"adamw_{name}")


def optimizer_entry(optimizer: Optimizer) -> OptimizerEntry:
    """The registry entry of a configured optimizer; ConfigError: no installed package has one."""
    option = option_of(optimizer)
    entry = OPTIMIZER_REGISTRY.get(option) or load_plugin("eke.optimizers", option)
    if entry is None:
        why = "no installed package registers it (entry point group eke.optimizers)"
        raise ConfigError([Problem("optimizer", option, why, Fix("optimizer=adamw"))])
    assert isinstance(entry, OptimizerEntry), f"eke.optimizers: {option} is no OptimizerEntry"
    return entry
