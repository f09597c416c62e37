"""Matrix multiplications of a micro-batch, and transfers and updates of an optimizer step.

A weight of n elements and T tokens costs 2 n T FLOPs forward, and as many each for the gradient of
its input and its own (arXiv:2204.02311, appendix B). Executed FLOPs are counted, not mathematical
ones: a model's own attention also computes the masked half, and a fused kernel recomputes scores in
the backward pass (five products instead of four: arXiv:2205.14135, section 3.2).

Exchanges follow ring algorithms (arXiv:1910.02054, section 7): each of n processes sends (n - 1) /
n of the bytes in an all-gather or a reduce-scatter, and twice that in an all-reduce. Operations of
optimizers were counted by benchmarks/update_work.py.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from eke.config.schema import FSDP, Config, GradientSync, NvmeOffload
from eke.estimate.memory.activations import Activations
from eke.estimate.memory.sharding import num_layers, units
from eke.estimate.time.rates import exact_span
from eke.models.families import AttentionLayers, Role, Shape, Tokens, Weight
from eke.models.sizes import exchange_of, optimizer_entry, training_structure
from eke.plan.planner import Plan

FUSED_BACKWARD, PLAIN_BACKWARD = 2.5, 2.0
"""Attention's backward FLOPs relative to its forward FLOPs."""

_SCORE_READS = (2, 4)
"""Reads and writes of all scores by plain attention's products, forward and backward."""

_OPERAND_READS = (4, 8)
"""Query-sized tensors that fused attention reads or writes: queries, keys, values and results
forward, and also the gradients of all of them backward (arXiv:2307.08691)."""


@dataclass(frozen=True)
class _Group:
    """Weights that are multiplied with the same tokens."""

    kind: str
    """`head` for the projection onto the vocabulary or the classes, else `linear`."""
    tokens: Tokens
    numbers: float
    """Elements per token."""
    backward: float
    """FLOPs of the backward pass relative to the forward pass."""
    stored: float
    """Elements, including experts that a token does not use."""
    widths: float
    """Sum of the widths of inputs and outputs."""


@dataclass(frozen=True)
class Product:
    """FLOPs of one kind and pass, and bytes of their operands."""

    kind: str
    """`linear`, `head` or `attention`."""
    flops: float
    moved: float
    fused: bool = False
    """True if one kernel computes all of attention."""


class Contents:
    """Totals over the parts of a model as trained."""

    def __init__(self, config: Config) -> None:
        structure = training_structure(config)
        weights, self.attention = structure.weights, structure.attention
        kinds = {(w.tokens, _is_head(w)): None for w in weights if w.tokens is not Tokens.none}
        alike = [[w for w in weights if (w.tokens, _is_head(w)) == kind] for kind in kinds]
        self.groups = tuple(map(_group, alike))
        self.numbers = float(sum(prod(w.shape) for w in weights))
        """Elements of all weights."""
        trained = [w for w in weights if w.trained]
        self.trained = float(sum(prod(w.shape) for w in trained))
        self.trained_tensors = len(trained)
        hidden = [w.shape for w in trained if w.role is Role.hidden and len(w.shape) == 2]
        matrices = Counter((min(shape), max(shape)) for shape in hidden)
        self.matrices = tuple((*sizes, count) for sizes, count in matrices.items())
        """Trained hidden matrices: rows, columns, number of matrices with that shape."""
        self.four_bits = float(sum(prod(w.shape) for w in weights if w.four_bits))
        self.adapted = sum(w.is_adapter for w in weights) // 2
        """Linear layers with an adapter."""


def _group(weights: Sequence[Weight]) -> _Group:
    numbers = sum(w.num_active for w in weights)
    gradients = sum(w.num_active * (w.trained + w.backward) for w in weights)
    # Only experts that a token uses.
    widths = (sum(w.shape[-2:]) * (w.active[0] if len(w.shape) > 2 else 1) for w in weights)
    return _Group(
        kind="head" if _is_head(weights[0]) else "linear",
        tokens=weights[0].tokens,
        numbers=float(numbers),
        backward=gradients / numbers if numbers else 0.0,
        stored=float(sum(prod(w.shape) for w in weights)),
        widths=float(sum(widths)),
    )


def _is_head(weight: Weight) -> bool:
    return weight.place is not Role.hidden and len(weight.shape) == 2


def products(contents: Contents, shape: Shape, fused: bool, backward: bool) -> list[Product]:
    """Return the matrix multiplications of one pass. `fused`: attention is one kernel."""
    found = []
    for group in contents.groups:
        tokens = _count(shape, group.tokens)
        each = 2 * group.numbers * tokens
        operands = (group.widths * tokens + group.stored) * shape.compute
        if backward:
            each, operands = each * group.backward, operands * group.backward
        found.append(Product(group.kind, each, operands))
    found += [_attention(one, shape, fused, backward) for one in contents.attention]
    return found


def _attention(one: AttentionLayers, shape: Shape, fused: bool, backward: bool) -> Product:
    queries, keys = _count(shape, one.queries), _count(shape, one.keys)
    length = shape.source if one.keys is Tokens.source else shape.target
    scores = float(queries * length)
    layers = one.num_layers - (one.idle if backward else 0)
    flops = 4.0 * layers * one.width * scores
    vectors = (queries + keys) / 2 * one.width * layers * shape.compute
    if fused:
        flops *= (0.5 if one.causal else 1.0) * (FUSED_BACKWARD if backward else 1.0)
        return Product("attention", flops, vectors * _OPERAND_READS[backward], fused=True)
    flops *= PLAIN_BACKWARD if backward else 1.0
    matrices = scores * shape.heads * layers * shape.compute
    moved = matrices * _SCORE_READS[backward] + vectors * _OPERAND_READS[backward]
    return Product("attention", flops, moved)


def _count(shape: Shape, tokens: Tokens) -> float:
    """Return the number of vectors in one micro-batch."""
    if tokens is Tokens.predicted:
        return shape.predicted * shape.rows * shape.target
    if tokens is Tokens.sample:
        return shape.rows
    if tokens is Tokens.none:
        return 0
    return shape.rows * (shape.source if tokens is Tokens.source else shape.target)


_STATE_READS = 2 * 12
"""Bytes per parameter that an update from a disk moves: float32 weight and two moments, twice."""


class MemoryTraffic:
    """Transfers of one process in one optimizer step, for rows of a shape."""

    def __init__(self, plan: Plan, contents: Contents, shape: Shape) -> None:
        self.exchanged, self.collectives = _exchanged(plan, contents)
        """Bytes sent to other devices, and number of collectives."""
        self.to_host, self.on_host, self.to_disk = _offloaded(plan, contents)
        """Bytes over PCI Express both ways, parameters updated by the host, and bytes of a disk."""
        if plan.config.memory.activation_offload and plan.device.kind != "cpu":
            kept = Activations(plan, shape, training_structure(plan.config).weights).offloaded
            self.to_host += 2.0 * kept * plan.batch.accumulation


def _offloaded(plan: Plan, contents: Contents) -> tuple[float, float, float]:
    config = plan.config
    if not config.offload.is_on or plan.device.kind == "cpu":
        return 0.0, 0.0, 0.0
    numbers = contents.trained / plan.ranks.shards
    width = plan.compute.weight_bytes
    moved = 2 * width * numbers  # gradients to the host, weights back
    disk = 0.0
    if isinstance(config.offload, NvmeOffload):
        disk = _STATE_READS * numbers
    if config.offload.moves_weights:  # each process loads its shard for every pass
        width = plan.compute.frozen_bytes
        moved += 2 * plan.batch.accumulation * width * contents.numbers / plan.ranks.shards
    return moved, numbers, disk


def _exchanged(plan: Plan, contents: Contents) -> tuple[float, int]:
    config, rounds = plan.config, plan.batch.accumulation
    ranks = plan.ranks
    count = max(plan.batch.world_size, plan.batch.devices)
    if count < 2:
        return 0.0, 0
    part = (count - 1) / count
    formats = plan.compute
    weights = formats.frozen_bytes * contents.numbers
    gradients = formats.weight_bytes * contents.trained
    layers = max(1, config.model.num_hidden_layers)
    if ranks.is_dp:
        # The first device sends all weights and gathers all gradients, in every micro-batch.
        return (count - 1) * rounds * (weights + gradients), 2 * rounds * layers
    if ranks.zero_stage == 3:
        return part * rounds * (2 * weights + gradients), 3 * rounds * layers
    if ranks.fsdp:
        return _exchanged_parts(plan, ranks.fsdp)
    reduced = rounds if ranks.zero_stage == 2 else 1
    back = weights if ranks.zero_stage else gradients  # updated weights in ZeRO, sums in DDP
    return part * (reduced * gradients + back), 25


def _exchanged_parts(plan: Plan, sharing: FSDP) -> tuple[float, int]:
    """Return FSDP2's traffic: gathers, float32 reductions, and reductions between replicas."""
    rounds, cut, layers = plan.batch.accumulation, sharing.shards, num_layers(plan.config)
    layer, table, head = units(plan, training_structure(plan.config).weights)
    gathers = rounds * (2 if sharing.reshard_after_forward else 1)
    sums = rounds if exchange_of(plan.config) is GradientSync.every else 1
    whole = gathers * layers * layer[0] + rounds * (table[0] + head[0])
    reduced = sums * (layers * layer[2] + table[2] + head[2])
    copied = 2 * (1 - cut / sharing.num_processes) * reduced / cut
    return (1 - 1 / cut) * (whole + reduced) + copied, (gathers + sums) * (layers + 2)


_HOST_LOOPS = {"deepspeed_cpu": "adamw_fused"}
"""Implementations of AdamW that were not counted, and their substitutes."""

_ADDS = 12
"""Bytes per element of a gradient added to another: two reads and a write of float32."""


@cache
def counts(name: str) -> Mapping[str, Any]:
    """Return the counts by operator in `NAME.json` next to this file."""
    content: dict[str, Any] = json.loads(Path(__file__).with_name(f"{name}.json").read_text())
    return content


class Updates:
    """Work of one process's update in an optimizer step, with clipping and accumulation."""

    def __init__(self, plan: Plan, contents: Contents) -> None:
        entry, self.notes = _entry(plan)
        config, tensors = plan.config, contents.trained_tensors
        # Parameters that this process updates on its device. With offloading, the host does.
        numbers = 0.0 if config.offload.is_on else contents.trained / plan.ranks.shards
        shared = numbers < contents.trained
        if shared and plan.ranks.zero_stage:
            tensors = min(tensors, 4)  # flat shards, one per parameter group
        moved, launches = entry["bytes"] * numbers, 0.0
        if numbers:
            each = max(int(config.memory.optimizer_in_backward), entry["each"])
            launches = entry["launches"] + each * tensors
        clip = counts("counted_updates")["clip"]
        if config.train.max_grad_norm is not None and numbers:
            moved += clip["bytes"] * numbers
            launches += clip["launches"] + clip["each"] * tensors
        again = plan.batch.accumulation - 1
        moved += again * _ADDS * contents.trained
        launches += again * contents.trained_tensors
        if plan.compute.loss_scaling:
            moved += 8 * numbers  # the scaler reads and writes each gradient once
            launches += 4
        count = optimizer_entry(config.optimizer).update_flops
        flops = [num * count(config, *n) for *n, num in contents.matrices] if count else []
        self.flops = sum(flops)
        """FLOPs of matrix multiplications, in the narrower format that the optimizer has."""
        self.moved, self.launches = exact_span(moved), launches


def _entry(plan: Plan) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return the counts of the optimizer, and a note if they are another one's."""
    option, table = plan.config.optimizer.option, counts("counted_updates")
    known = optimizer_entry(plan.config.optimizer)
    stands_in = known.counted_as
    if known.implementation:
        loop = plan.compute.optimizer_implementation or "foreach"
        option, stands_in = f"adamw_{loop}", _HOST_LOOPS.get(loop, "")
    note = f"{option}: counted as {stands_in}, which moves about as much" if stands_in else ""
    option = stands_in or option
    narrow = "narrow" if plan.compute.weights != "float32" and not plan.compute.master else "wide"
    found = table.get(f"{option}/{narrow}") or table.get(f"{option}/wide")
    if found is None:
        return table["adamw_fused/wide"], (f"{option}: counted as torch's fused AdamW",)
    return found, ((note,) if note else ())
