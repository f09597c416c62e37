"""Matrix multiplications of one micro-batch: what is computed, in which format, and their operands.

A weight of n numbers and T tokens cost 2 n T FLOPs forward, as many for its input's gradient and
for its own (arXiv:2204.02311, appendix B); a frozen weight has none of the last. Unlike
`eke.models.sizes.flops`, which counts what mathematics needs, here is what is executed: a model's
own attention computes the masked half, too, a fused kernel computes the scores once more backward
(five products in place of four: arXiv:2205.14135, section 3.2), and checkpointing the forward pass.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from eke.estimate.memory.shape import Shape
from eke.models.sizes import Attention, Role, Structure, Tokens, Weight, training_structure
from eke.plan.planner import Plan

FUSED_BACKWARD, PLAIN_BACKWARD = 2.5, 2.0
"""Attention's backward FLOPs over its forward ones."""

SCORE_READS = (2, 4)
"""Times that plain attention's products read or write all scores, forward and backward."""

OPERAND_READS = (4, 8)
"""Tensors as large as the queries that fused attention reads or writes, forward and backward:
queries, keys, values, results; then these, their gradients and the results' (arXiv:2307.08691)."""


@dataclass(frozen=True)
class Group:
    """Weights that are multiplied with the same tokens."""

    tokens: Tokens
    head: bool
    """Of the projection onto the vocabulary or the classes."""
    numbers: float
    """That a token passes through."""
    trained: float
    stored: float
    """With the experts a token does not pass through."""
    widths: float
    """Sum of inputs and outputs."""


@dataclass(frozen=True)
class Contents:
    """What a model is made of, summed up."""

    groups: tuple[Group, ...]
    attention: tuple[Attention, ...]
    numbers: float
    """All."""
    trained: float
    trained_tensors: int
    matrices: tuple[tuple[int, int, int], ...]
    """Trained hidden matrices: rows, columns, how many of that shape."""
    four_bits: float
    adapted: int
    """Linear layers with an adapter."""


@dataclass(frozen=True)
class Product:
    """FLOPs of one kind and pass, and bytes of their operands."""

    kind: str
    """`linear`, `head` or `attention`."""
    flops: float
    moved: float
    fused: bool = False
    """One kernel for all of attention."""


def contents_of(plan: Plan) -> Contents:
    """Of the model as it is trained; kept for plans that differ in other groups."""
    config = plan.config
    model = (config.model, config.task, config.peft, config.kernels.sparse_prediction)
    key = repr((*model, config.precision.weights, config.data.seq_len))
    found = _KEPT.get(key)
    if found is None:
        while len(_KEPT) >= MOST_KEPT:
            _KEPT.pop(next(iter(_KEPT)))
        found = _KEPT[key] = _summed_up(training_structure(config))
    return found


MOST_KEPT = 64
"""Models that are remembered: a sweep has few, and asks for each of them a thousand times."""

_KEPT: dict[str, Contents] = {}


def _summed_up(found: Structure) -> Contents:
    weights = found.weights
    kinds = dict.fromkeys((w.tokens, _is_head(w)) for w in weights if w.tokens is not Tokens.none)
    groups = []
    for tokens, head in kinds:
        mine = [w for w in weights if w.tokens is tokens and _is_head(w) == head]
        groups.append(
            Group(
                tokens=tokens,
                head=head,
                numbers=float(sum(w.num_active for w in mine)),
                trained=float(sum(w.num_active for w in mine if w.trained)),
                stored=float(sum(prod(w.shape) for w in mine)),
                widths=float(sum(sum(w.shape[-2:]) * _passes(w) for w in mine)),
            )
        )
    trained = [w for w in weights if w.trained]
    return Contents(
        groups=tuple(groups),
        attention=found.attention,
        numbers=float(sum(prod(w.shape) for w in weights)),
        trained=float(sum(prod(w.shape) for w in trained)),
        trained_tensors=len(trained),
        matrices=_matrices(trained),
        four_bits=float(sum(prod(w.shape) for w in weights if w.four_bits)),
        adapted=sum(w.is_adapter for w in weights) // 2,
    )


def _is_head(weight: Weight) -> bool:
    return weight.place is not Role.hidden and len(weight.shape) == 2


def _passes(weight: Weight) -> float:
    """How many of a stack of experts a token passes through."""
    return float(weight.active[0]) if len(weight.shape) > 2 else 1.0


def _matrices(trained: Iterable[Weight]) -> tuple[tuple[int, int, int], ...]:
    counts: dict[tuple[int, int], int] = {}
    for weight in trained:
        if weight.role is Role.hidden and len(weight.shape) == 2:
            rows, columns = sorted(weight.shape)
            counts[rows, columns] = counts.get((rows, columns), 0) + 1
    return tuple((rows, columns, count) for (rows, columns), count in counts.items())


def products(
    contents: Contents, shape: Shape, fused: bool, backward: bool, grouped: bool = False
) -> list[Product]:
    """Matrix multiplications of one micro-batch's forward or backward pass.

    Args:
        contents: of the model.
        shape: of the forward pass, with rows as long as they are.
        fused: attention is one kernel.
        backward: of the backward pass.
        grouped: leave the head out: of a recomputation.
    """
    found = []
    for group in contents.groups:
        if grouped and group.head:
            continue
        tokens = _count(shape, group.tokens)
        each = 2 * group.numbers * tokens
        operands = (group.widths * tokens + group.stored) * shape.compute
        if backward:
            share = group.trained / group.numbers if group.numbers else 0.0
            each, operands = each * (1 + share), operands * (1 + share)
        found.append(Product("head" if group.head else "linear", each, operands))
    found += [_attention(one, shape, fused, backward) for one in contents.attention]
    return found


def _attention(one: Attention, shape: Shape, fused: bool, backward: bool) -> Product:
    queries, keys = _count(shape, one.queries), _count(shape, one.keys)
    length = shape.source if one.keys is Tokens.source else shape.target
    scores = float(queries * length)
    flops = 4.0 * one.num_layers * one.width * scores
    vectors = (queries + keys) / 2 * one.width * one.num_layers * shape.compute
    if fused:
        flops *= (0.5 if one.causal else 1.0) * (FUSED_BACKWARD if backward else 1.0)
        return Product("attention", flops, vectors * OPERAND_READS[backward], fused=True)
    flops *= PLAIN_BACKWARD if backward else 1.0
    matrices = scores * shape.heads * one.num_layers * shape.compute
    moved = matrices * SCORE_READS[backward] + vectors * OPERAND_READS[backward]
    return Product("attention", flops, moved)


def _count(shape: Shape, tokens: Tokens) -> float:
    """Vectors of one micro-batch."""
    if tokens is Tokens.predicted:
        return shape.predicted * shape.rows * shape.target
    if tokens is Tokens.sample:
        return shape.rows
    if tokens is Tokens.none:
        return 0
    return shape.rows * (shape.source if tokens is Tokens.source else shape.target)
