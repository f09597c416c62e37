"""What one optimizer step of a plan has to do on one device, before any device is looked at."""

from dataclasses import dataclass, replace

from eke.config.schema import Checkpointing
from eke.estimate.memory.activations import attention_kernel
from eke.estimate.memory.shape import Shape, trains_adapters
from eke.estimate.time.fwd_bwd_cost import Pass, passes
from eke.estimate.time.lengths import mean_shape
from eke.estimate.time.optimizer_cost import Updates, updates
from eke.estimate.time.products import Contents, Product, contents_of, products
from eke.estimate.time.techniques import Effect, effect_of, notes_of
from eke.estimate.time.transfers import Moves, moves, updated_here
from eke.estimate.time.values import NOTHING, Span, exactly
from eke.plan.planner import Plan


@dataclass(frozen=True)
class Work:
    """Of one process on its device in one optimizer step, at the expected length of rows."""

    products: tuple[Product, ...]
    """Matrix multiplications of all micro-batches, recomputation included."""
    recomputed_flops: float
    """Of these, what checkpointing repeats."""
    moved: Span
    """Bytes that passes read and write beside them."""
    launches: Span
    """Kernels of the passes."""
    updates: Updates
    moves: Moves
    tokens: float
    """Of all micro-batches, padding included."""
    notes: tuple[str, ...] = ()

    @property
    def flops(self) -> float:
        """Of all matrix multiplications of the passes."""
        return sum(each.flops for each in self.products)


def work_of(plan: Plan) -> Work:
    """The work of one optimizer step."""
    contents = contents_of(plan)
    shape, note = mean_shape(plan)
    fused = attention_kernel(plan, shape) == "fused"
    rounds = plan.batch.accumulation
    forward, backward, layers = passes(plan, shape)
    effect = effect_of(plan)
    repeated = _repeated(plan, contents, shape, fused, layers)
    once = [*products(contents, shape, fused, False), *products(contents, shape, fused, True)]
    multiplied = [*_with_head(once, effect), *repeated.products]
    moved = forward.moved + backward.moved + repeated.moved + _adapters(plan, contents, shape)
    launches = forward.launches + backward.launches + _of_adapters(plan, contents)
    host = exactly(launches) + repeated.launches
    updated = updates(plan, contents, updated_here(plan, contents))
    moving = moves(plan, contents, shape)
    return Work(
        products=tuple(_times(each, rounds) for each in multiplied),
        recomputed_flops=rounds * sum(each.flops for each in repeated.products),
        moved=effect.moved * (moved * rounds),
        launches=host.by(effect.launches) * rounds,
        updates=updated,
        moves=moving,
        tokens=float(rounds * shape.rows * max(shape.source, shape.target)),
        notes=(*notes_of(plan, shape), *([note] if note else []), *updated.notes, *moving.notes),
    )


@dataclass(frozen=True)
class _Repeated:
    """What checkpointing does again in each micro-batch."""

    products: tuple[Product, ...] = ()
    moved: float = 0.0
    launches: Span = NOTHING


SELECTIVE_HOST = 3.0
"""Host time of a launch that goes through the Python policy of selective checkpointing, at most,
over a plain one: an assumption."""


def _repeated(plan: Plan, contents: Contents, shape: Shape, fused: bool, layers: Pass) -> _Repeated:
    """The forward pass of every nth layer, without the results that selective keeps."""
    memory = plan.config.memory
    if memory.checkpointing is Checkpointing.off:
        return _Repeated()
    count = max(1, shape.layers + shape.decoder_layers)
    share = len(range(0, count, memory.every_n)) / count
    moved, launches = share * layers.moved, share * layers.launches
    if memory.checkpointing is Checkpointing.selective:
        return _Repeated((), moved, Span(launches / 2, launches, SELECTIVE_HOST * launches))
    again = products(contents, shape, fused, backward=False, grouped=True)
    return _Repeated(tuple(_times(each, share) for each in again), moved, exactly(launches))


def _times(product: Product, factor: float) -> Product:
    return replace(product, flops=product.flops * factor, moved=product.moved * factor)


def _with_head(each: list[Product], effect: Effect) -> list[Product]:
    """The vocabulary's projection once more where the fused loss does not keep it."""
    return [_times(p, effect.head) if p.kind == "head" else p for p in each]


ADAPTER_LAUNCHES = 14
"""Kernels of one adapted linear layer beside its own, forward and backward: dropout or cast, two
products, scaling and addition; their gradients (peft 0.18, LoraLayer.forward)."""

ADAPTER_READS = 8
"""Times that tensors as wide as the layer are read or written for it."""


def _of_adapters(plan: Plan, contents: Contents) -> float:
    return float(ADAPTER_LAUNCHES * contents.adapted) if trains_adapters(plan.config) else 0.0


def _adapters(plan: Plan, contents: Contents, shape: Shape) -> float:
    """Bytes moved for adapters, and for weights that are unpacked from 4 bits."""
    if not trains_adapters(plan.config):
        return 0.0
    per = ADAPTER_READS * shape.compute * shape.tokens * shape.hidden
    # Read in 4 bits and written in 16, once forward and once backward (arXiv:2305.14314).
    return contents.adapted * per + 2 * 2.5 * contents.four_bits
