"""Memory of the training state: what stays allocated between steps, and what lies on a disk.

Formulas follow deepspeed 0.19.8: the optimizer works on flat float32 pieces, copies of the weights
cut evenly between processes (arXiv:1910.02054). A piece, its moments and the gradients of its
larger weights are one file each (`runtime/swap_tensor`, `runtime/zero/stage3.py`).
"""

from dataclasses import dataclass, replace
from math import prod
from typing import cast

from eke.config.schema import (
    FSDP,
    Adapters,
    BaseWeights,
    Casts,
    Compute,
    Config,
    Evaluation,
    Exchange,
    Float8,
    NvmeOffload,
    QLora,
    Switch,
    Weights,
    WeightsPlace,
)
from eke.models.families import FLOAT32_BYTES, Role, Tokens, Weight, family_of
from eke.models.sizes.optimizers import optimizer_bytes, optimizer_entry, paged_bytes
from eke.models.sizes.parameters import ModelSize, training_structure

BFLOAT16_BYTES = 2

STAGE = {"zero1": 1, "zero2": 2, "zero3": 3}
"""Options of the group `distributed` by which DeepSpeed shares out the state."""

IN_PARTS = ("fsdp", "zero3")
"""Those whose weights are drawn or read in parts."""

BLOCK, SCALES_PER_BLOCK = 64, 256
"""Weights per scale, and scales per scale of scales: arXiv:2305.14314, section 3."""

CODE_BYTES, SCALE_CODE_BYTES = 16 * FLOAT32_BYTES, 256 * FLOAT32_BYTES
"""The values that 4 and 8 bits stand for, kept with each tensor."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes of one process, without activations; of the first one, which has the largest parts."""

    weights: int
    """With their 16-bit copies."""
    gradients: int
    """All of them; the largest one where the optimizer steps in the backward pass."""
    optimizer: int
    """Moments, without scalar step counters."""
    master: int = 0
    """Float32 copies of narrower weights, for the optimizer to step on."""
    start: int = 0
    """While weights are made or read: all of them, or a part and the largest tensor whole."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.gradients + self.optimizer + self.master

    @property
    def peak(self) -> int:
        """The most of them at any time."""
        return max(self.start, self.total)


@dataclass(frozen=True)
class WeightFormats:
    """Number formats of the training state; a plan decides them once."""

    weights: str
    """torch dtype name of trained weights and gradients; adapters are float32."""
    master: bool
    """The optimizer updates float32 copies of narrower weights."""
    frozen: str
    """torch dtype name of frozen weights."""
    copies: str = ""
    """torch dtype name of the copies of float32 weights that a step computes with; "" without."""
    gathered: str = ""
    """torch dtype name that FSDP2 sends float32 matrices in; "" where each weight has its own."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of a trained weight's number, and of its gradient."""
        return _width(self.weights)

    @property
    def frozen_bytes(self) -> int:
        """Bytes of a frozen weight's number."""
        return _width(self.frozen)

    @property
    def stream_bytes(self) -> int:
        """Bytes of a number of the residual stream where embeddings are frozen, or nothing is."""
        return _width(self.copies or self.frozen)


def _width(dtype: str) -> int:
    """Bytes of one number, by torch's name of its format."""
    return FLOAT32_BYTES if dtype == "float32" else BFLOAT16_BYTES


def decide_formats(config: Config) -> WeightFormats:
    """Decide the formats: float32 copies where configured and useful, and in ZeRO."""
    precision = config.precision
    wanted = precision.master is Switch.on or config.distributed.option in STAGE
    master = precision.weights is Weights.bfloat16 and wanted
    narrow = precision.weights is Weights.float32 and precision.compute is not Compute.float32
    copies = precision.compute.value if narrow and precision.casts is Casts.per_step else ""
    # What is sent once is computed with in training and evaluation; float8 scales, and DoRA's norms
    # are, of float32 weights.
    sent = isinstance(config.distributed, FSDP) and narrow and len(computed_formats(config)) == 1
    sent = sent and precision.float8 is Float8.off and config.peft.option != "dora"
    gathered = precision.compute.value if sent else ""
    frozen = _frozen_format(config)
    return WeightFormats(precision.weights.value, master, frozen, copies, gathered)


def computed_formats(config: Config) -> set[str]:
    """Number formats that training and evaluation compute in."""
    precision = config.precision
    return {precision.compute.value, precision.evaluation.value} - {Evaluation.same.value}


def _frozen_format(config: Config) -> str:
    """Format of frozen weights: the one typed, or of what training and evaluation compute in."""
    precision, peft = config.precision, config.peft
    trained: str = precision.weights.value
    if isinstance(peft, Adapters) and peft.base_weights is not BaseWeights.auto:
        return str(peft.base_weights.value)
    if not isinstance(peft, Adapters) and not config.model.freeze:
        return trained
    formats = computed_formats(config)
    return formats.pop() if len(formats) == 1 else trained


def state_bytes(config: Config, formats: WeightFormats | None = None) -> StateBytes:
    """Exact bytes of the state after a step; without `formats`, which a plan has, decided here."""
    whole = training_structure(config).weights
    weights, cut = whole, config.distributed.option in IN_PARTS
    if isinstance(config.distributed, FSDP):
        weights = tuple(replace(weight, shape=_part(config, weight.shape)) for weight in whole)
    trained = [weight for weight in weights if weight.trained]
    gradients = [w for w in whole if w.trained] if adds_up_whole(config) else trained
    formats = formats or decide_formats(config)
    at_once = max if config.memory.optimizer_in_backward else sum
    stored = sum(_stored_bytes(config, formats, weight) for weight in weights)
    largest = max((_number_bytes(formats, w) * prod(w.shape) for w in whole), default=0)
    return StateBytes(
        weights=stored,
        gradients=at_once(_number_bytes(formats, w) * prod(w.shape) for w in gradients),
        optimizer=optimizer_bytes(
            config,
            trained,
            lambda w: FLOAT32_BYTES if formats.master else _number_bytes(formats, w),
        ),
        master=FLOAT32_BYTES * sum(prod(w.shape) for w in trained) if formats.master else 0,
        start=stored + largest * cut,
    )


def sent_bytes(config: Config, formats: WeightFormats, weight: Weight) -> int:
    """A whole tensor in the format in which FSDP2 gathers it: not all are sent in 16 bits."""
    if weight.four_bits:
        return _stored_bytes(config, formats, weight)
    is_wide = weight.role is Role.vector or (weight.role is Role.embedding and not formats.copies)
    width = _number_bytes(formats, weight)
    narrow = formats.gathered and not is_wide
    return prod(weight.shape) * (min(width, BFLOAT16_BYTES) if narrow else width)


def _part(config: Config, shape: tuple[int, ...]) -> tuple[int, ...]:
    """FSDP2's first part of a tensor: torch's Shard cuts the first dimension, rounding up."""
    if not shape:
        return shape
    return (-(-shape[0] // cast(FSDP, config.distributed).shards), *shape[1:])


WHOLE_GRADIENTS_BYTES = 8 * 2**30
"""Larger gradients add up in parts: a choice, a tenth of an 80 GiB device."""


def exchange_of(config: Config) -> Exchange:
    """After which micro-batches of a step FSDP2 shares gradients out; `auto` goes by their size."""
    typed = cast(FSDP, config.distributed).exchange
    trained = (prod(w.shape) for w in training_structure(config).weights if w.trained)
    is_large = FLOAT32_BYTES * sum(trained) > WHOLE_GRADIENTS_BYTES and _accumulation(config) > 1
    chosen = Exchange.every if is_large else Exchange.last
    return chosen if typed is Exchange.auto else typed


def _accumulation(config: Config) -> int:
    """Micro-batches of a step, as far as they are known before there is a plan."""
    batch = config.batch
    per_round = batch.micro_batch * config.distributed.num_processes
    return batch.target // per_round if batch.target else batch.accumulation or 1


def adds_up_whole(config: Config) -> bool:
    """Whether gradients of several micro-batches add up before they are shared out."""
    several = isinstance(config.distributed, FSDP) and _accumulation(config) > 1
    return several and exchange_of(config) is Exchange.last


def _number_bytes(formats: WeightFormats, weight: Weight) -> int:
    """Adapters stay in float32 with narrower weights: PEFT's default."""
    if weight.is_adapter:
        return FLOAT32_BYTES
    return formats.weight_bytes if weight.trained else formats.frozen_bytes


def _stored_bytes(config: Config, formats: WeightFormats, weight: Weight) -> int:
    numbers = prod(weight.shape)
    is_float16 = "float16" in (formats.frozen, formats.copies)
    kept = family_of(config).float32_layers if is_float16 else ()
    if weight.module.rpartition(".")[2] in kept and not weight.is_adapter:
        return FLOAT32_BYTES * numbers
    if not weight.four_bits:
        width = _number_bytes(formats, weight)
        looked_up = weight.trained and weight.place is Role.embedding
        copied = formats.copies and not formats.gathered and width == FLOAT32_BYTES
        copied = copied and not (looked_up and weight.tokens is Tokens.none)
        return (width + (BFLOAT16_BYTES if copied else 0)) * numbers
    return four_bit_bytes(numbers, cast(QLora, config.peft).double_quant)


def four_bit_bytes(numbers: int, double_quant: bool) -> int:
    """Bytes of one tensor as bitsandbytes 0.50 keeps it: two numbers in a byte, and the scales.

    Source: bitsandbytes.functional.quantize_4bit and QuantState; arXiv:2305.14314, section 3.
    """
    blocks = -(-numbers // BLOCK)
    packed = -(-numbers // 2) + CODE_BYTES
    if not double_quant:
        return packed + FLOAT32_BYTES * blocks
    return packed + blocks + FLOAT32_BYTES * -(-blocks // SCALES_PER_BLOCK) + SCALE_CODE_BYTES


PIECE_BUFFERS = 4
"""Pinned buffers of a piece's size: weights, gradient and AdamW's two moments (`buffer_count`)."""


@dataclass(frozen=True)
class SwapBytes:
    """Bytes of one process."""

    files: int
    """On the disk: pieces, their moments and gradients."""
    memory: int
    """Host memory: buffers, and the pieces and moments that are too small for a file."""
    pinned: int
    """Of the host memory, buffers that must be locked (`ulimit -l`)."""


def state_files(config: Config) -> SwapBytes | None:
    """What one process has on the disk; None where nothing is to be there.

    Exact while no role has more numbers than a piece may. A role with more is cut in the model's
    order, which sizes do not know: its pieces are taken to be full, and the last one to be large
    enough for a file. Weights on the disk, which a rule refuses, are not counted.
    """
    offload, processes = config.offload, config.distributed.num_processes
    if not isinstance(offload, NvmeOffload) or config.distributed.option != "zero3":
        return None
    state, trained = state_bytes(config), trained_weights(config)
    copies = 1 + state.optimizer // (state.gradients or 1)  # the weights and their moments
    unit = 1024 * offload.threads // FLOAT32_BYTES  # files are multiples: `AIO_ALIGNED_BYTES`
    numbers, buffer, kept = 0, 0, 0
    for role in Role:
        parts = [-(-prod(w.shape) // processes) for w in trained if w.role is role]
        whole = sum(parts)
        # At most: a piece is closed by the weight that fills it.
        piece = min(whole, offload.piece_numbers + max(parts, default=0) - 1)
        buffer = max(buffer, -(-piece // unit) * unit)
        if not _is_written(offload, whole):
            kept += whole
            continue
        numbers += copies * -(-whole // unit) * unit
        # The rest of a gradient stays in host memory.
        numbers += sum(part // unit * unit for part in parts if _is_written(offload, part))
    buffers = PIECE_BUFFERS * buffer
    return SwapBytes(
        files=FLOAT32_BYTES * numbers,
        memory=FLOAT32_BYTES * (buffers + copies * kept),
        pinned=FLOAT32_BYTES * buffers,
    )


def _is_written(offload: NvmeOffload, numbers: int) -> bool:
    """Whether a float32 tensor of so many numbers is written to the disk at all."""
    return numbers * FLOAT32_BYTES >= max(2**20, offload.block_bytes)  # `MIN_AIO_BYTES`


ALIGNMENT = 2
"""Numbers a flat piece is a multiple of in ZeRO-1 and 2: `nccl_start_alignment_factor`."""


def trained_weights(config: Config) -> list[Weight]:
    """Tensors that get a gradient."""
    return [weight for weight in training_structure(config).weights if weight.trained]


def pieces(config: Config) -> dict[Role, int]:
    """Numbers in each of one process's flat pieces: its share of a parameter group, and padding."""
    processes = config.distributed.num_processes
    trained = trained_weights(config)
    found = {}
    for role in Role:
        mine = [prod(weight.shape) for weight in trained if weight.role is role]
        # ZeRO-1 and 2 pad each parameter group, one per role, ZeRO-3 each weight.
        if STAGE[config.distributed.option] == 3:
            numbers = sum(-(-number // processes) for number in mine)
        else:
            numbers = -(-sum(mine) // (ALIGNMENT * processes)) * ALIGNMENT
        if numbers:
            found[role] = numbers
    return found


def flat_pieces(config: Config) -> list[Weight]:
    """The pieces as the optimizer sees them: flat, and float32."""
    # `optimizer.embeddings_32bit` finds those of embeddings under ZeRO-3 alone, which puts a piece
    # in the place that the group's first weight had: bitsandbytes 0.50 goes by that place.
    knows = STAGE[config.distributed.option] == 3
    return [
        Weight((numbers,), place=role if knows else Role.hidden)
        for role, numbers in pieces(config).items()
    ]


def shared_state_bytes(
    config: Config, size: ModelSize, host: bool = False, formats: WeightFormats | None = None
) -> StateBytes:
    """Bytes of one process on its device; everything where nothing is shared or moved.

    ZeRO-3's small weights, not sharded, are not counted: a lower bound, by 10 x hidden size
    numbers a weight at most. `host` counts what waits in host memory, too: a CPU's device memory is
    just that.
    """
    formats = formats or decide_formats(config)
    whole = state_bytes(config, formats)
    if host and config.distributed.option not in IN_PARTS:  # built before it is moved or rounded
        whole = replace(whole, start=max(whole.start, formats.frozen_bytes * size.num_parameters))
    pages = optimizer_entry(config.optimizer).pages and not host
    if config.distributed.option not in STAGE:
        paged = paged_bytes(config, trained_weights(config)) if pages else 0
        return replace(whole, optimizer=whole.optimizer - paged)
    stage, offload = STAGE[config.distributed.option], config.offload.option
    processes = config.distributed.num_processes
    numbers = sum(pieces(config).values())
    trained = sum(prod(w.shape) for w in trained_weights(config)) or 1
    optimizer = optimizer_bytes(config, flat_pieces(config))
    # ZeRO-3 steps on float32 weights themselves where it keeps them on the device.
    if stage < 3 or offload != "none" or formats.weight_bytes < FLOAT32_BYTES:
        optimizer += FLOAT32_BYTES * numbers
    optimizer -= paged_bytes(config, flat_pieces(config)) if pages else 0
    gradients = whole.gradients if stage == 1 else whole.gradients * numbers // trained
    weights = whole.weights if stage < 3 else -(-whole.weights // processes)
    leave = config.offload.option == "params_cpu"  # or wait outside of the device's memory by nvme
    if isinstance(config.offload, NvmeOffload):
        leave = config.offload.weights is not WeightsPlace.device
    if host and (files := state_files(config)):
        optimizer = files.memory
    return StateBytes(
        weights=0 if leave and not host else weights,
        gradients=0 if offload != "none" and stage > 1 and not host else gradients,
        optimizer=0 if offload != "none" and not host else optimizer,
        start=weights + whole.start - whole.weights if stage == 3 else 0,
    )
