"""Activations of one micro-batch, by eke.models.families, and an optimizer step's temporaries."""

from dataclasses import replace
from math import prod

from eke.config.schema import Backend, Checkpointing, Config, Lora
from eke.estimate.memory.components import (
    ZERO_RANGE,
    Range,
    range_around,
)
from eke.models import sizes
from eke.models.families import (
    FLOAT32_BYTES,
    Kernel,
    Role,
    Shape,
    Stack,
    Tokens,
    Weight,
    family_of,
)
from eke.models.families.family_record import INDEX_BYTES
from eke.models.sizes.optimizers import LOOPS, UpdateSizes
from eke.plan.planner import Plan


def optimizer_temporaries(plan: Plan, parts: tuple[Weight, ...]) -> Range:
    """Return the temporary bytes of an optimizer step, without weights, gradients and states."""
    config = plan.config
    trained = [w for w in parts if w.trained]
    if not trained:
        return ZERO_RANGE
    number = FLOAT32_BYTES if plan.compute.master else plan.compute.weight_bytes
    if plan.ranks.zero_stage:  # flat shards, one after another
        trained, number = sizes.flat_pieces(config), FLOAT32_BYTES
    largest = number * max(prod(w.shape) for w in trained)
    groups = [number * sum(prod(w.shape) for w in trained if w.role is role) for role in Role]
    hidden = [prod(w.shape) for w in trained if w.role is Role.hidden]
    in_8_bits = [prod(w.shape) for w in trained if sizes.quantises_state(config.optimizer, w)]
    step = UpdateSizes(
        config.optimizer,
        largest,
        max(groups),
        sum(groups),
        hidden=number * max(hidden, default=0),
        in_8_bits=number * max(in_8_bits, default=0),
        number_bytes=number,
        on_cpu=plan.device.kind == "cpu",
    )
    in_backward = config.memory.optimizer_in_backward
    if in_backward:  # one weight at a time
        step = replace(step, group=largest, total=largest)
    loop = plan.compute.optimizer_implementation
    formula = LOOPS[loop] if loop else sizes.optimizer_entry(config.optimizer).temporaries
    found = range_around(0, *formula(step))
    if plan.compute.master and not in_backward and not plan.ranks.zero_stage:
        # While the optimizer updates the copies, there are also float32 gradients.
        more = 0 if step.on_cpu else step.total // 4
        found = range_around(
            found.low, found.expected + step.total // 2, found.high + step.total + more
        )
    return found


def singular_vectors(plan: Plan, parts: tuple[Weight, ...]) -> int:
    """Return the bytes of GaLore's singular vectors beyond its projections."""
    # A projection is a slice: galore-torch 1.0, galore_projector.py, get_orthogonal_matrix.
    if not sizes.optimizer_entry(plan.config.optimizer).keeps_singular_vectors:
        return 0
    rank, number = sizes.projection_rank(plan.config), plan.compute.weight_bytes
    short = [min(w.shape) for w in parts if w.trained and w.role is Role.hidden]
    return number * sum(side * max(0, side - rank) for side in short)


def attention_kernel(plan: Plan, shape: Shape) -> Kernel:
    """Return the kind of attention kernel."""
    option, backend = plan.config.attention.option, plan.config.attention.backend
    if option == "eager":
        return "eager"
    without_dropout = shape.on_cpu and shape.dropout  # PyTorch's CPU kernel has no dropout
    on_math = option == "sdpa" and (backend is Backend.math or without_dropout)
    return "math" if on_math else "fused"


class Activations:
    """Bytes of one micro-batch on one device that the forward pass keeps or needs."""

    def __init__(self, plan: Plan, shape: Shape, parts: tuple[Weight, ...]) -> None:
        config = plan.config
        stacks = shape.architecture.stacks(shape, attention_kernel(plan, shape))
        each = _adapted(plan, shape, stacks, parts)
        passed = sizes.passed_layers(config, [stack.count for stack in each])
        each = tuple(Stack(stack.layer, n) for stack, n in zip(each, passed, strict=True))
        kept, passing, share = _checkpointed(config, shape, each)
        layer = self.one_layer = max((stack.layer.kept for stack in each), default=0)
        """Bytes kept by one layer, for passes without gradients and the last one backward."""
        self.offloaded = 0
        """Kept bytes that are offloaded to host memory."""
        if config.memory.activation_offload and not shape.on_cpu:
            self.offloaded, kept, share = kept, 0, 0.0  # copies of weights are made again
            passing = max(passing, layer)
        needed = sum(s.layer.needed * s.count for s in each)
        if config.peft.is_on or config.memory.checkpointing is not Checkpointing.off:
            needed = 0
        if config.model.freeze:  # a frozen layer keeps no operands, but is computed
            kept, needed = max(kept, layer), 0
        self.kept = kept + _bytes_outside_layers(config, shape)
        """Bytes of all layers, embeddings and the head at the end of the forward pass."""
        self.needed = min(needed, kept)
        """Part of `kept` that every implementation needs."""
        self.passing = passing
        """Bytes of one layer recomputed in the backward pass. 0 without checkpointing."""
        self.working = max((stack.layer.working for stack in each), default=0)
        """Bytes of gradients of activations that are alive at once."""
        casts = _cast_bytes(plan, parts)
        self.casts, self.largest_cast = sum(casts), max(casts, default=0)
        """Autocast's 16-bit copies of weights in the forward pass, and the largest copy."""
        self.casts_kept = int(self.casts * share)
        """Part of the copies that the backward pass keeps."""
        self.logits_forward, self.logits_backward, self.logits_needed = _logits(plan, shape)
        """Logits in all their formats at the end of the forward pass, probabilities and their
        gradients at the start of the backward pass, and the least of these in any unfused loss."""


def _checkpointed(config: Config, shape: Shape, each: tuple[Stack, ...]) -> tuple[int, int, float]:
    """Return the bytes kept by all layers, and by the recomputed one, and the share kept."""
    memory = config.memory
    whole = sum(stack.layer.kept * stack.count for stack in each)
    if memory.checkpointing is Checkpointing.off:
        return whole, 0, 1.0
    total = sum(stack.count for stack in each)
    kept = first = 0
    for number, stack in enumerate(each):
        tokens = shape.rows * (shape.target if number else shape.source)
        inputs = tokens * shape.hidden * shape.weights
        dear = stack.layer.dear if memory.checkpointing is Checkpointing.selective else 0
        # Every nth of all layers in a row, T5's encoder first.
        repeated = len(range(-first % memory.every_n, stack.count, memory.every_n))
        kept += repeated * (inputs + dear) + (stack.count - repeated) * stack.layer.kept
        first += stack.count
    repeated = len(range(0, total, memory.every_n))
    selective = memory.checkpointing is Checkpointing.selective
    again = [s.layer.kept - s.layer.dear if selective else s.layer.kept for s in each]
    # If the last layer is kept, the first recomputation reuses its memory.
    freed = (total - 1) % memory.every_n * each[-1].layer.kept if each else 0
    return min(kept, whole), max(0, max([0, *again]) - freed), 1 - repeated / max(1, total)


def _bytes_outside_layers(config: Config, shape: Shape) -> int:
    """Return the bytes of ids, embedding norms, masks, rotary positions and the head's input."""
    tokens, hidden = shape.tokens, shape.hidden
    positions = tokens * 3 * INDEX_BYTES + shape.rows * shape.target * 2 * INDEX_BYTES
    norm = hidden * (FLOAT32_BYTES + 2 * shape.weights + (shape.compute if shape.cast else 0))
    outer = positions + tokens * norm
    return outer + shape.architecture.outside(shape, config.targets.option)


def _cast_bytes(plan: Plan, parts: tuple[Weight, ...]) -> list[int]:
    """Return the 16-bit copies of float32 weights for linear layers and stacks of experts."""
    formats = plan.compute
    if plan.compute.autocast is None or formats.copies or formats.gathered:
        return []  # FSDP2 gathers 16 bits
    # ZeRO-3's linear layers cast a view, which autocast does not keep.
    is_kept = plan.ranks.zero_stage != 3 or family_of(plan.config).stores_transposed
    is_narrow = formats.frozen_bytes < FLOAT32_BYTES
    return [
        sizes.BFLOAT16_BYTES * prod(w.shape)
        for w in parts
        if w.tokens is not Tokens.none
        and len(w.shape) > (1 if is_kept else 2)
        and not w.four_bits
        and not w.is_adapter  # cast by each of its two products
        and (w.trained or not is_narrow)
    ]


def _logits(plan: Plan, shape: Shape) -> tuple[int, int, int]:
    """Return the bytes of logits at the end of the forward pass, in the backward pass, at least."""
    config = plan.config
    if not config.targets.per_token:
        return 0, 0, 0
    rows = sizes.most_predicted(config, shape.rows, shape.target)
    numbers = rows * shape.vocabulary
    compiled = config.compile.is_inductor and not shape.on_cpu
    if config.kernels.fused_linear_cross_entropy:
        chunk = sizes.chunk_rows(rows, shape.vocabulary, shape.compute) * shape.vocabulary
        of_hidden = FLOAT32_BYTES * rows * shape.hidden
        head = 0 if config.peft.is_on else shape.vocabulary * shape.hidden
        block = 0 if compiled else min(FLOAT32_BYTES * chunk, sizes.BLOCK_BYTES)
        rounded = shape.compute * head if shape.on_cpu and shape.compute < FLOAT32_BYTES else 0
        gradients = of_hidden + FLOAT32_BYTES * head
        return gradients + shape.compute * chunk + max(block, rounded), gradients, 0
    if compiled:
        return shape.compute * numbers, 2 * shape.compute * numbers, shape.compute * numbers
    copies = shape.compute if shape.compute < FLOAT32_BYTES else 0
    forward = numbers * (copies + 2 * FLOAT32_BYTES)
    return forward, numbers * 3 * FLOAT32_BYTES, numbers * 2 * FLOAT32_BYTES


def _adapted(
    plan: Plan, shape: Shape, each: tuple[Stack, ...], parts: tuple[Weight, ...]
) -> tuple[Stack, ...]:
    """Return stacks with frozen weights: fewer kept operands, plus the adapters' operands.

    Frozen layers keep no input. Each adapter keeps its input (without autocast in float32, by
    peft's `_cast_input_dtype`) and its inner result.
    """
    config = plan.config
    if not config.peft.is_on:
        return each
    total = sum(stack.count for stack in each) or 1
    rank = config.peft.r if isinstance(config.peft, Lora) else 0
    # Inputs of matrix A, shape (r, in). Without casts, adapters of one input share it.
    read = [w.shape[1] for w in parts if w.is_adapter and len(w.shape) == 2 and w.shape[0] == rank]
    autocast = plan.compute.autocast is not None
    widened = not autocast or config.peft.is_dora  # as in training.model.adapters
    narrow = shape.cast or (shape.weights < FLOAT32_BYTES and widened)
    width = shape.compute if autocast else FLOAT32_BYTES
    inputs = sum(read) * width // total if narrow else 0
    results = len(read) * rank * width // total
    tokens = shape.rows * max(shape.source, shape.target if shape.decoder_layers else 0)
    saved = 0
    if sizes.fuses_adapters(config) and shape.architecture.is_gated and not shape.experts:
        # SiLU(gate), its product with up, and the norms' float32 inputs are recomputed.
        saved = tokens * (2 * shape.inner * width + 2 * shape.hidden * (FLOAT32_BYTES - width))
    lost, added = 2 * tokens * shape.hidden * shape.weights, tokens * (inputs + results)
    changed = []
    for layer, count in ((stack.layer, stack.count) for stack in each):
        stream = max(0, layer.stream - lost) if rank == 0 or not narrow else lost
        wide = max(0, layer.feed_forward + added - saved)
        dear = layer.dear + added
        frozen = replace(layer, stream=stream, feed_forward=wide, needed=0, dear=dear)
        changed.append(Stack(frozen, count))
    return tuple(changed)
