"""Work of one optimizer step per device, independent of the device.

The operations of each family's layers besides matrix multiplications were counted one by one on
tensors without data, as for a GPU (benchmarks/step_work.py writes counted.json, and
tests/unit/estimate/time counts again). No number in that file is fitted to a time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from eke.config.schema import Checkpointing
from eke.estimate.memory.activations import attention_kernel
from eke.estimate.memory.components import shape_of
from eke.estimate.time.memory_traffic import (
    Contents,
    MemoryTraffic,
    Product,
    Updates,
    counts,
    products,
)
from eke.estimate.time.rates import ZERO_SPAN, Span, exact_span
from eke.estimate.time.slowdowns import factors_of, notes_of
from eke.models.families import FAMILIES, Shape
from eke.models.sizes import fuses_adapters, passed_layers
from eke.plan.planner import Plan, simulated_micro_batches

_Units = dict[str, float]
"""Number of elements by kind of tensor."""


def _stacks_of(shape: Shape) -> dict[str, int]:
    if shape.architecture.is_encoder_decoder:
        return {"encoder": shape.layers, "decoder": shape.decoder_layers}
    return {"layer": shape.layers}


def layer_units(shape: Shape, stack: str) -> _Units:
    """Return the elements of a layer's tensors. `stack`: `layer`, or T5's `encoder`, `decoder`."""
    length = shape.target if stack == "decoder" else shape.source
    tokens = shape.rows * length
    # Elements of the layer's matrices, including all experts.
    weights = 2.0 * shape.hidden * (shape.queries + shape.keys) * (2 if stack == "decoder" else 1)
    feed_forward = (3 if shape.gated else 2) * shape.hidden * shape.inner
    weights += shape.experts * (feed_forward + shape.hidden) if shape.experts else feed_forward
    found: dict[str, float] = {
        "stream": tokens * shape.hidden,
        "inner": tokens * shape.inner,
        "heads": tokens * shape.heads,
        "scores": tokens * shape.heads * length,
        "masks": tokens * length,
        "weights": weights,
    }
    widths = {"queries": tokens * shape.queries, "keys": tokens * shape.keys}
    found |= {name: widths[name] for name in shape.architecture.widths}
    if stack == "decoder":
        found["read"] = shape.rows * shape.source * shape.hidden
        found["crossed"] = shape.rows * shape.source * shape.queries
        found["crossings"] = tokens * shape.heads * shape.source
    if shape.experts:
        found["inner"] = tokens * shape.chosen * shape.inner
        found["routed"] = tokens * shape.chosen * shape.hidden
    return found


def outer_units(shape: Shape, classifies: bool) -> _Units:
    """Return the elements outside the layers: embedding, last norm, head and loss."""
    tokens = shape.rows * shape.target
    found: dict[str, float] = {
        "stream": tokens * shape.hidden,
        "masks": tokens * shape.target,
        "table": shape.vocabulary * shape.hidden,
        "widths": shape.hidden * shape.hidden,
    }
    if not classifies:
        found["logits"] = shape.predicted * tokens * shape.vocabulary
    if shape.architecture.is_encoder_decoder:
        found["read"] = shape.rows * shape.source * shape.hidden
        found["biases"] = shape.heads * (shape.target**2 + shape.source**2)
    return found


@dataclass(frozen=True)
class _Pass:
    """Forward or backward pass of one micro-batch."""

    moved: float
    """Bytes read and written outside matrix multiplications."""
    launches: float
    """Kernels, including matrix multiplications."""


def passes(plan: Plan, shape: Shape) -> tuple[_Pass, _Pass, _Pass]:
    """Return the forward pass, the backward pass, and the layers' forward pass."""
    layers, outer = _entries(plan, shape)
    around = outer_units(shape, not plan.targets.per_token)
    stacks, found = _stacks_of(shape), []
    passed = passed_layers(plan.config, list(stacks.values()))
    for phase, each in (("forward", stacks.values()), ("backward", passed)):
        moved, launches = 0.0, 0.0
        for stack, count in zip(stacks, each, strict=True):
            entry = layers[stack][phase]
            moved += count * _bytes(entry, layer_units(shape, stack))
            launches += count * entry["launches"]
        entry = outer[phase]
        whole = _Pass(moved + _bytes(entry, around), launches + entry["launches"])
        found += [_Pass(moved, launches), whole]
    return found[1], found[3], found[0]


def _bytes(entry: Mapping[str, float], units: Mapping[str, float]) -> float:
    return max(0.0, sum(entry.get(name, 0.0) * number for name, number in units.items()))


def _entries(plan: Plan, shape: Shape) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    counted_as = shape.architecture.counted_as or shape.architecture.name
    table = counts("counted")[counted_as]
    width = "cast" if shape.cast else ("wide" if shape.weights == 4 else "narrow")
    kernel = "fused" if attention_kernel(plan, shape) == "fused" else "eager"
    dropped = "dropped" if shape.dropout else "whole"
    layers = table.get(f"{width}/{kernel}/{dropped}") or table[f"{width}/{kernel}/whole"]
    task = FAMILIES[counted_as].tasks[0] if plan.targets.per_token else plan.targets.option
    outer = table[f"{width}/fused/whole"]
    return layers, outer.get(task) or next(
        v for k, v in outer.items() if k not in _stacks_of(shape)
    )


class Work:
    """Work of one process in one optimizer step, at the expected length of rows."""

    def __init__(self, plan: Plan) -> None:
        contents, rounds = Contents(plan.config), plan.batch.accumulation
        shape = shape_of(plan, simulated_micro_batches(plan).mean)
        fused = attention_kernel(plan, shape) == "fused"
        forward, backward, layers = passes(plan, shape)
        moved_factor, launches_factor = factors_of(plan)
        there, back = (products(contents, shape, fused, is_back) for is_back in (False, True))
        again, moved_again, launched_again = _repeated(plan, there, shape, layers)
        moved = forward.moved + backward.moved + moved_again + _adapters(plan, contents, shape)
        launches = forward.launches + backward.launches
        if plan.config.peft.is_on:
            launches += _ADAPTER_LAUNCHES * contents.adapted
        self.products = tuple(_times(each, rounds) for each in (*there, *back, *again))
        """Matrix multiplications of all micro-batches, including recomputation."""
        self.moved = moved_factor * (moved * rounds)
        """Other bytes that the passes read and write."""
        self.launches = (exact_span(launches) + launched_again).by(launches_factor) * rounds
        self.updates, self.moves = Updates(plan, contents), MemoryTraffic(plan, contents, shape)
        self.tokens = float(rounds * shape.rows * max(shape.source, shape.target))
        """Tokens of all micro-batches, including padding."""
        self.notes = (*notes_of(plan, shape), *self.updates.notes)


_SELECTIVE_HOST = 3.0
"""Highest host time of a launch in selective checkpointing's Python policy: an assumption."""


def _repeated(
    plan: Plan, forward: list[Product], shape: Shape, layers: _Pass
) -> tuple[list[Product], float, Span]:
    """Return products, bytes and launches of the forward passes that checkpointing repeats."""
    memory = plan.config.memory
    if memory.checkpointing is Checkpointing.off:
        return [], 0.0, ZERO_SPAN
    count = max(1, shape.layers + shape.decoder_layers)
    passed = sum(passed_layers(plan.config, list(_stacks_of(shape).values())))
    share = len(range(0, count, memory.every_n)) / count * passed / count
    moved, launches = share * layers.moved, share * layers.launches
    if memory.checkpointing is Checkpointing.selective:
        return [], moved, Span(launches / 2, launches, _SELECTIVE_HOST * launches)
    again = [_times(each, share) for each in forward if each.kind != "head"]
    return again, moved, exact_span(launches)


def _times(product: Product, factor: float) -> Product:
    return replace(product, flops=product.flops * factor, moved=product.moved * factor)


_ADAPTER_LAUNCHES = 14
"""Additional kernels of an adapted linear layer, forward and backward: dropout or cast, two
products, scaling, addition, and their gradients (peft 0.18, LoraLayer.forward)."""

_ADAPTER_READS = 8
"""Reads and writes of layer-wide tensors per adapted layer."""


def _adapters(plan: Plan, contents: Contents, shape: Shape) -> float:
    """Return the bytes moved for adapters and for unpacking 4-bit weights."""
    if not plan.config.peft.is_on:
        return 0.0
    # By count, `peft.fused` saves 12 to 14 (notes/lab/techniques.md).
    reads = 0 if fuses_adapters(plan.config) else _ADAPTER_READS
    per = reads * shape.compute * shape.tokens * shape.hidden
    # Read in 4 bits and written in 16, once forward and once backward (arXiv:2305.14314).
    return contents.adapted * per + 2 * 2.5 * contents.four_bits
