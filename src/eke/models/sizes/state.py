"""Bytes of the training state that stay allocated between steps, in memory and on a disk.

Formulas follow deepspeed 0.19.8. Its optimizer works on flat float32 shards: copies of the weights,
divided evenly between processes (arXiv:1910.02054). With NVMe offload a shard, its moments and the
gradients of its larger weights are one file each (`runtime/swap_tensor`, `runtime/zero/stage3.py`).
"""

from dataclasses import dataclass, replace
from math import prod
from typing import cast

from eke.config import schema
from eke.config.schema import Config, GradientSync
from eke.models.families import FLOAT32_BYTES, Role, Tokens, Weight, family_of
from eke.models.sizes.optimizers import optimizer_bytes, optimizer_entry, paged_bytes
from eke.models.sizes.parameters import ModelSize, training_structure

BFLOAT16_BYTES = 2

BLOCK, SCALES_PER_BLOCK = 64, 256
"""Weights per scale, and scales per second-level scale: arXiv:2305.14314, section 3."""

CODE_BYTES, SCALE_CODE_BYTES = 16 * FLOAT32_BYTES, 256 * FLOAT32_BYTES
"""Bytes of the tables of 4-bit and 8-bit values, kept with each tensor."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes of the first process, which has the largest shards, without activations."""

    weights: int
    """Weights and their 16-bit copies."""
    gradients: int
    """All gradients, or the largest if the optimizer steps in the backward pass."""
    optimizer: int
    """Moments without scalar step counters."""
    master: int = 0
    """Float32 copies of 16-bit weights, which the optimizer updates."""
    start: int = 0
    """Bytes during initialization or loading of weights: all, or a shard and the largest tensor."""

    @property
    def total(self) -> int:
        """Bytes of weights, gradients, optimizer state and float32 copies."""
        return self.weights + self.gradients + self.optimizer + self.master

    @property
    def peak(self) -> int:
        """Largest bytes of state at any time."""
        return max(self.start, self.total)


@dataclass(frozen=True)
class WeightFormats:
    """Number formats of the training state, decided once per plan."""

    weights: str = "float32"
    """torch dtype name of trained weights and gradients. Adapters are float32."""
    master: bool = False
    """True if the optimizer updates float32 copies of 16-bit weights."""
    frozen: str = "float32"
    """torch dtype name of frozen weights, equal to `weights` without frozen weights."""
    copies: str = ""
    """torch dtype name of the copies of float32 weights used in a step, "" without copies."""
    gathered: str = ""
    """torch dtype name in which FSDP2 gathers float32 matrices, "": the format of each weight."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of one number of trained weights and gradients."""
        return _width(self.weights)

    @property
    def frozen_bytes(self) -> int:
        """Bytes of one number of frozen weights."""
        return _width(self.frozen)

    @property
    def stream_bytes(self) -> int:
        """Bytes of one number of the residual stream if embeddings or no weights are frozen."""
        return _width(self.copies or self.frozen)


def _width(dtype: str) -> int:
    return FLOAT32_BYTES if dtype == "float32" else BFLOAT16_BYTES


def decide_formats(config: Config) -> WeightFormats:
    """Decide the number formats. ZeRO always has float32 copies of 16-bit weights."""
    precision = config.precision
    wanted = precision.master is schema.AutoBool.on or config.ranks.zero_stage > 0
    master = precision.weights is schema.Weights.bfloat16 and wanted
    is_wide = precision.weights is schema.Weights.float32
    narrow = is_wide and precision.compute is not schema.Compute.float32
    copies = precision.compute.value if narrow and precision.casts is schema.Casts.per_step else ""
    # Gathered weights are used in training and evaluation, so both must compute in one format.
    # Scales of float8 and norms of DoRA need float32 weights.
    sent = config.ranks.fsdp is not None and narrow and len(computed_formats(config)) == 1
    sent = sent and precision.float8 is schema.Float8.off and not config.peft.is_dora
    gathered = precision.compute.value if sent else ""
    return WeightFormats(precision.weights.value, master, _frozen_format(config), copies, gathered)


def computed_formats(config: Config) -> set[str]:
    """Return the number formats of computation in training and evaluation."""
    precision = config.precision
    return {precision.compute.value, precision.evaluation.value} - {schema.Evaluation.same.value}


def _frozen_format(config: Config) -> str:
    """Return the format of frozen weights: as configured, else the only format of computation."""
    precision, peft = config.precision, config.peft
    trained: str = precision.weights.value
    if isinstance(peft, schema.Adapters) and peft.base_weights is not schema.BaseWeights.auto:
        return str(peft.base_weights.value)
    if not isinstance(peft, schema.Adapters) and not config.model.freeze:
        return trained
    formats = computed_formats(config)
    return formats.pop() if len(formats) == 1 else trained


def state_bytes(config: Config, formats: WeightFormats | None = None) -> StateBytes:
    """Return the exact bytes of the state after a step; `formats` None: decided here."""
    whole = training_structure(config).weights
    weights, ranks = whole, config.ranks
    if ranks.fsdp:
        # FSDP2's first shard: the first dimension divided and rounded up.
        parts = [(*(-(-n // ranks.shards) for n in w.shape[:1]), *w.shape[1:]) for w in whole]
        weights = tuple(replace(w, shape=part) for w, part in zip(whole, parts, strict=True))
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
        start=stored + largest * ranks.shards_weights,
    )


def sent_bytes(config: Config, formats: WeightFormats, weight: Weight) -> int:
    """Return the bytes of a full tensor in the format in which FSDP2 gathers it."""
    if weight.four_bits:
        return _stored_bytes(config, formats, weight)
    is_wide = weight.role is Role.vector or (weight.role is Role.embedding and not formats.copies)
    width = _number_bytes(formats, weight)
    narrow = formats.gathered and not is_wide
    return prod(weight.shape) * (min(width, BFLOAT16_BYTES) if narrow else width)


WHOLE_GRADIENTS_BYTES = 8 * 2**30
"""Limit for accumulating full gradients: a tenth of an 80 GiB device (a choice)."""


def exchange_of(config: Config) -> GradientSync:
    """Return when FSDP2 synchronizes gradients; `auto` is decided by their size."""
    typed = cast(schema.FSDP, config.ranks.fsdp).exchange
    trained = (prod(w.shape) for w in training_structure(config).weights if w.trained)
    is_large = FLOAT32_BYTES * sum(trained) > WHOLE_GRADIENTS_BYTES and _accumulation(config) > 1
    chosen = GradientSync.every if is_large else GradientSync.last
    return chosen if typed is GradientSync.auto else typed


def _accumulation(config: Config) -> int:
    """Return the micro-batches per step that are known before there is a plan."""
    batch = config.batch
    per_round = batch.micro_batch * config.ranks.num_processes
    return batch.target // per_round if batch.target else batch.accumulation or 1


def adds_up_whole(config: Config) -> bool:
    """Return whether full gradients of several micro-batches accumulate before synchronization."""
    several = config.ranks.fsdp is not None and _accumulation(config) > 1
    return several and exchange_of(config) is GradientSync.last


def _number_bytes(formats: WeightFormats, weight: Weight) -> int:
    """Return the bytes of one number of a weight. Adapters are float32 (PEFT's default)."""
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
    # Half a byte per number, and scales. Source: quantize_4bit and QuantState of bitsandbytes 0.50;
    # arXiv:2305.14314, section 3.
    blocks = -(-numbers // BLOCK)
    packed = -(-numbers // 2) + CODE_BYTES
    if not cast(schema.QLora, config.peft).double_quant:
        return packed + FLOAT32_BYTES * blocks
    return packed + blocks + FLOAT32_BYTES * -(-blocks // SCALES_PER_BLOCK) + SCALE_CODE_BYTES


PIECE_BUFFERS = 4
"""Pinned buffers of a shard's size: weights, gradient, AdamW's two moments (`buffer_count`)."""


@dataclass(frozen=True)
class SwapBytes:
    """Bytes of one process with NVMe offload."""

    files: int
    """Files: shards, their moments and gradients."""
    memory: int
    """Host memory: buffers, and shards and moments that are too small for a file."""
    pinned: int
    """Part of `memory` that must be locked (`ulimit -l`): the buffers."""


def state_files(config: Config) -> SwapBytes | None:
    """Return the bytes of one process with NVMe offload of the state, None without it.

    Exact if every role fits into one shard. Otherwise the division depends on the model's order, so
    shards are assumed to be full, and the last one large enough for a file. Weights on the disk are
    not counted: a rule rejects them.
    """
    offload, processes = config.offload, config.ranks.num_processes
    if not isinstance(offload, schema.NvmeOffload) or config.ranks.zero_stage < 3:
        return None
    state, trained = state_bytes(config), trained_weights(config)
    copies = 1 + state.optimizer // (state.gradients or 1)  # weights and their moments
    unit = 1024 * offload.threads // FLOAT32_BYTES  # granularity of files: `AIO_ALIGNED_BYTES`
    numbers, buffer, kept = 0, 0, 0
    for role in Role:
        parts = [-(-prod(w.shape) // processes) for w in trained if w.role is role]
        whole = sum(parts)
        # Upper bound: the weight that fills a shard is its last.
        piece = min(whole, offload.piece_numbers + max(parts, default=0) - 1)
        buffer = max(buffer, -(-piece // unit) * unit)
        if not _is_written(offload, whole):
            kept += whole
            continue
        numbers += copies * -(-whole // unit) * unit
        # The remainder of a gradient stays in host memory.
        numbers += sum(part // unit * unit for part in parts if _is_written(offload, part))
    buffers = PIECE_BUFFERS * buffer
    return SwapBytes(
        files=FLOAT32_BYTES * numbers,
        memory=FLOAT32_BYTES * (buffers + copies * kept),
        pinned=FLOAT32_BYTES * buffers,
    )


def _is_written(offload: schema.NvmeOffload, numbers: int) -> bool:
    """Return whether a float32 tensor is large enough for a file."""
    return numbers * FLOAT32_BYTES >= max(2**20, offload.block_bytes)  # `MIN_AIO_BYTES`


_ALIGNMENT = 2
"""Granularity of flat shards in ZeRO-1 and 2, in numbers: `nccl_start_alignment_factor`."""


def trained_weights(config: Config) -> list[Weight]:
    """Return the tensors with a gradient."""
    return [weight for weight in training_structure(config).weights if weight.trained]


def flat_shard_sizes(config: Config) -> dict[Role, int]:
    """Return the numbers in each flat shard of a process (one per parameter group) with padding."""
    processes = config.ranks.num_processes
    trained = trained_weights(config)
    found = {}
    for role in Role:
        mine = [prod(weight.shape) for weight in trained if weight.role is role]
        # ZeRO-1 and 2 pad each parameter group (one per role), ZeRO-3 each weight.
        if config.ranks.zero_stage == 3:
            numbers = sum(-(-number // processes) for number in mine)
        else:
            numbers = -(-sum(mine) // (_ALIGNMENT * processes)) * _ALIGNMENT
        if numbers:
            found[role] = numbers
    return found


def flat_pieces(config: Config) -> list[Weight]:
    """Return the flat float32 shards as weights of the optimizer."""
    # bitsandbytes 0.50 finds embeddings by their position in the parameter groups. Only ZeRO-3 puts
    # a shard at the position of the group's first weight.
    has_roles = config.ranks.zero_stage == 3
    return [
        Weight((numbers,), place=role if has_roles else Role.hidden)
        for role, numbers in flat_shard_sizes(config).items()
    ]


def shared_state_bytes(
    config: Config, size: ModelSize, host: bool = False, formats: WeightFormats | None = None
) -> StateBytes:
    """Return the bytes of one process on its device after sharding and offload.

    `host` includes offloaded bytes in host memory, for CPUs. The result is a lower bound: weights
    that ZeRO-3 does not shard (at most 10 x hidden size numbers each) are not counted.
    """
    formats = formats or decide_formats(config)
    whole = state_bytes(config, formats)
    if host and not config.ranks.shards_weights:  # built before moved or rounded
        whole = replace(whole, start=max(whole.start, formats.frozen_bytes * size.num_parameters))
    pages = optimizer_entry(config.optimizer).pages and not host
    if not config.ranks.zero_stage:
        paged = paged_bytes(config, trained_weights(config)) if pages else 0
        return replace(whole, optimizer=whole.optimizer - paged)
    stage, offload = config.ranks.zero_stage, config.offload
    processes = config.ranks.num_processes
    numbers = sum(flat_shard_sizes(config).values())
    trained = sum(prod(w.shape) for w in trained_weights(config)) or 1
    optimizer = optimizer_bytes(config, flat_pieces(config))
    # ZeRO-3 updates float32 weights directly if they are on the device.
    if stage < 3 or offload.is_on or formats.weight_bytes < FLOAT32_BYTES:
        optimizer += FLOAT32_BYTES * numbers
    optimizer -= paged_bytes(config, flat_pieces(config)) if pages else 0
    gradients = whole.gradients if stage == 1 else whole.gradients * numbers // trained
    weights = whole.weights if stage < 3 else -(-whole.weights // processes)
    if host and (files := state_files(config)):
        optimizer = files.memory
    return StateBytes(
        weights=0 if offload.moves_weights and not host else weights,
        gradients=0 if offload.is_on and stage > 1 and not host else gradients,
        optimizer=0 if offload.is_on and not host else optimizer,
        start=weights + whole.start - whole.weights if stage == 3 else 0,
    )
