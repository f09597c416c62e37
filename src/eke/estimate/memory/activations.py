"""Activations of one micro-batch: what waits for the backward pass, and what only passes.

Temporary memory of an optimizer step, by the formulas of its registry entry.

What autograd keeps of one Transformer layer, tensor by tensor, as transformers 5.23 computes it.

The method is that of Korthikanti et al. 2022, arXiv:2205.05198, section 4.1 (whose 34 s b h holds
for one GPT layer in 16 bits with dropout); the tensors are read from each family's modelling_*.py,
and their sums agree with what saved-tensor hooks count on a CPU (tests/unit/estimate/memory).
An operation that casts keeps nothing; a matrix multiplication keeps its operands; a product keeps
both factors where both need gradients. Under autocast each linear layer casts its own input.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from eke.config.schema import Backend, Checkpointing, Config, Lora
from eke.estimate.memory.components import NOTHING, Range, Shape, spread, trains_adapters
from eke.models.sizes import (
    FLOAT32_BYTES,
    STAGE,
    Role,
    Tokens,
    Weight,
    describe,
    flat_pieces,
    has_master,
    is_quantised,
    most_predicted,
    projection_rank,
    weight_bytes,
)
from eke.models.sizes.families import is_classification
from eke.models.sizes.optimizers import LOOPS, Step
from eke.plan.planner import Plan


def optimizer_temporaries(plan: Plan, parts: tuple[Weight, ...]) -> Range:
    """Temporary bytes of an optimizer step, without weights, gradients and states.

    Args:
        plan: of the run.
        parts: `eke.models.sizes.training_structure` of the plan's configuration.
    """
    config = plan.config
    trained = [w for w in parts if w.trained]
    if not trained:
        return NOTHING
    number = FLOAT32_BYTES if has_master(config) else weight_bytes(config)
    if config.distributed.option in STAGE:  # flat shards, one after the other
        trained, number = flat_pieces(config), FLOAT32_BYTES
    largest = number * max(prod(w.shape) for w in trained)
    in_8_bits = number * max(
        (prod(w.shape) for w in trained if is_quantised(config.optimizer, w)), default=0
    )
    step = Step(
        config.optimizer,
        largest,
        *_groups(trained, number),
        hidden=_hidden(trained, number),
        in_8_bits=in_8_bits,
        number_bytes=number,
        on_cpu=plan.device.kind == "cpu",
    )
    in_backward = config.memory.optimizer_in_backward
    if in_backward:  # one weight at a time
        step = replace(step, group=largest, total=largest)
    loop = plan.compute.optimizer_implementation
    formula = LOOPS[loop] if loop else describe(config.optimizer).temporaries
    found = spread(0, *formula(step))
    if has_master(config) and not in_backward and config.distributed.option not in STAGE:
        # The gradients once more, in float32, while the optimizer steps on the copies.
        more = 0 if step.on_cpu else step.total // 4
        found = spread(found.low, found.expected + step.total // 2, found.high + step.total + more)
    return found


def singular_vectors(config: Config, parts: tuple[Weight, ...]) -> int:
    """Bytes that GaLore holds beyond its projections, which are slices of all singular vectors.

    Source: galore-torch 1.0, galore_projector.py, get_orthogonal_matrix; a slice keeps the whole.
    """
    if not describe(config.optimizer).keeps_singular_vectors:
        return 0
    rank, number = projection_rank(config), weight_bytes(config)
    short = [min(w.shape) for w in parts if w.trained and w.role is Role.hidden]
    return number * sum(side * max(0, side - rank) for side in short)


def _groups(trained: list[Weight], number: int) -> tuple[int, int]:
    by_role = [sum(prod(w.shape) for w in trained if w.role is role) for role in Role]
    return number * max(by_role), number * sum(by_role)


def _hidden(trained: list[Weight], number: int) -> int:
    return number * max((prod(w.shape) for w in trained if w.role is Role.hidden), default=0)


Kernel = Literal["fused", "math", "eager"]
"""Attention that never has the scores; PyTorch's plain path, in float32; a model's own."""


@dataclass(frozen=True)
class Layer:
    """Bytes that one layer keeps for the backward pass, per micro-batch."""

    stream: int
    """Residual stream, norms, and the inputs of linear layers."""
    attention: int
    """Queries, keys, values, results, and the extra tensors that the kernel keeps."""
    scores: int
    """Of these, matrices of queries x keys: unfused attention's."""
    feed_forward: int
    dropout: int
    """Masks outside of attention."""
    needed: int
    """What no implementation that recomputes nothing can do without: operands of the matrix
    multiplications, once each."""
    dear: int
    """Results of linear layers and fused attention: what selective checkpointing keeps."""
    working: int
    """Gradients of activations alive at once in this layer's backward pass."""

    @property
    def kept(self) -> int:
        """All of it."""
        return self.stream + self.attention + self.feed_forward + self.dropout


@dataclass(frozen=True)
class Stack:
    """Equal layers, and how many of them."""

    layer: Layer
    count: int


def stacks(shape: Shape, kernel: Kernel) -> tuple[Stack, ...]:
    """The model's stacks of layers, of which the given kernel computes attention."""
    if shape.family == "t5":
        own: Kernel = kernel
        if kernel == "fused" and shape.on_cpu:
            own = "math"  # a learned bias has a gradient: PyTorch's CPU kernel takes none
        encoder = _t5_layer(shape, own, kernel, decodes=False)
        decoder = _t5_layer(shape, own, kernel, decodes=True)
        return Stack(encoder, shape.layers), Stack(decoder, shape.decoder_layers)
    return (Stack(LAYERS.get(shape.family, _llama_layer)(shape, kernel), shape.layers),)


def kept_by_attention(
    shape: Shape, kernel: Kernel, source: int, target: int, biased: bool = False
) -> tuple[int, int]:
    """Bytes of one attention, and of these the score matrices.

    Args:
        shape: of the forward pass.
        kernel: of attention.
        source: length of the keys.
        target: length of the queries.
        biased: a learned float32 bias is added to the scores.
    """
    here, there = shape.rows * target, shape.rows * source
    compute, result = shape.compute, here * shape.queries * shape.compute
    if kernel == "fused":
        sums = here * shape.heads * FLOAT32_BYTES
        masks = 0
        if shape.masked and shape.on_cpu:
            masks = here * source * compute  # a boolean mask becomes one of numbers
        operands = (here * shape.queries + 2 * there * shape.repeated) * compute
        return operands + result + sums + masks, 0
    scores = here * shape.heads * source
    operands = (here + 2 * there) * shape.queries  # keys and values repeated for each query head
    if kernel == "math":
        matrices = FLOAT32_BYTES * scores * (3 if shape.dropout else 1)
        if shape.dropout and not shape.on_cpu:
            matrices = scores * (2 * FLOAT32_BYTES + 1)
        return operands * FLOAT32_BYTES + result + matrices, matrices
    matrices = scores * _eager_scores_bytes(shape, biased)
    return operands * compute + result + matrices, matrices


def _eager_scores_bytes(shape: Shape, biased: bool) -> int:
    """Bytes per score: the softmax, its mask and what is multiplied with the values."""
    plain = shape.family in ("bert", "t5")
    wide = FLOAT32_BYTES
    if plain and not shape.cast:
        wide = shape.compute
    elif plain and shape.on_cpu and not shape.masked and not biased:
        wide = shape.compute  # CPU autocast leaves a softmax in 16 bits; a float32 bias widens it
    elif shape.family == "gpt2" and not shape.cast:
        wide = shape.compute
    if not shape.dropout:
        return wide + (shape.compute if shape.compute < wide else 0)
    narrowed = shape.family == "gpt2" or not shape.cast  # before the dropout, not behind it
    mask = shape.mask_bytes if narrowed or not shape.on_cpu else wide
    return wide + mask + shape.compute


def _read(shape: Shape, readers: int) -> int:
    """Bytes per number of what `readers` linear layers read."""
    return readers * shape.compute if shape.cast else shape.weights


def _working(shape: Shape, length: int, kernel: Kernel, freed: int) -> int:
    """Gradients alive at once: of the feed-forward, of attention's operands, or of scores.

    Args:
        shape: of the forward pass.
        length: of the layer's sequences.
        kernel: of attention.
        freed: bytes the layer has freed when its attention's turn comes.
    """
    tokens = shape.rows * length
    wide = max(3 * shape.inner, 2 * shape.hidden + 3 * shape.queries) * tokens * shape.compute
    scores = 0
    if kernel != "fused":  # of the probabilities, and of what they came from
        scores = 2 * FLOAT32_BYTES * tokens * shape.heads * max(length, shape.source) - freed
    return max(wide, scores) + tokens * shape.hidden * shape.weights


def _llama_layer(shape: Shape, kernel: Kernel) -> Layer:
    """Llama, Qwen and Mixtral: RMSNorm in float32, rotary positions, gated feed-forward."""
    tokens, hidden = shape.tokens, shape.hidden
    readers = (3, 1 if shape.experts else 2)
    # Each RMSNorm keeps its input in float32, the normalised one and 1 / root; then its readers.
    per_norm = hidden * (FLOAT32_BYTES + shape.weights) + FLOAT32_BYTES
    stream = tokens * (2 * per_norm + hidden * sum(_read(shape, n) for n in readers))
    attention, scores = kept_by_attention(shape, kernel, shape.source, shape.source)
    if shape.family == "qwen3":  # and of each head's query and key
        width = shape.queries + shape.keys
        formats = FLOAT32_BYTES + shape.compute
        attention += tokens * (width * formats + 2 * shape.heads * FLOAT32_BYTES)
    inner = 4 * shape.inner * shape.compute
    linear = 2 * shape.inner * shape.compute
    if shape.experts:
        inner = shape.chosen * (2 * hidden + 4 * shape.inner) * shape.compute
        linear = shape.chosen * (hidden + 2 * shape.inner) * shape.compute
        inner += shape.chosen * 44 + shape.experts * FLOAT32_BYTES  # places, and who goes where
    operands = 2 * (shape.queries + shape.keys) + 2 * hidden
    gates = 2 * shape.inner if not shape.experts else shape.chosen * 2 * shape.inner
    return Layer(
        stream=stream,
        attention=attention,
        scores=scores,
        feed_forward=tokens * inner,
        dropout=0,
        needed=tokens * (operands + gates) * shape.compute,
        dear=tokens * ((2 * shape.queries + 2 * shape.keys + 2 * hidden) * shape.compute + linear),
        working=_working(shape, shape.source, kernel, tokens * inner) * (2 if shape.experts else 1),
    )


def _norm_layer(shape: Shape, kernel: Kernel, readers: tuple[int, int], inner: int) -> Layer:
    """BERT and GPT-2: two LayerNorms, which keep their input, and a plain feed-forward."""
    tokens, hidden = shape.tokens, shape.hidden
    per_norm = hidden * shape.weights + 2 * FLOAT32_BYTES
    stream = tokens * (2 * per_norm + hidden * sum(_read(shape, n) for n in readers))
    attention, scores = kept_by_attention(shape, kernel, shape.source, shape.source)
    dropped = 2 * tokens * hidden * shape.mask_bytes if shape.dropout else 0
    operands = 4 * hidden + 2 * hidden + shape.inner
    kept = tokens * inner * shape.inner * shape.compute
    return Layer(
        stream=stream,
        attention=attention,
        scores=scores,
        feed_forward=kept,
        dropout=dropped,
        needed=tokens * operands * shape.compute,
        dear=tokens * (6 * hidden + shape.inner) * shape.compute,
        working=_working(shape, shape.source, kernel, kept + dropped // 2),
    )


def _bert_layer(shape: Shape, kernel: Kernel) -> Layer:
    """Queries, keys and values read alike; GELU keeps its input, the next layer its result."""
    return _norm_layer(shape, kernel, readers=(3, 1), inner=2)


def _gpt2_layer(shape: Shape, kernel: Kernel) -> Layer:
    """One projection for all three; GELU by its formula, five tensors."""
    return _norm_layer(shape, kernel, readers=(1, 1), inner=5)


def _t5_layer(shape: Shape, own: Kernel, crossing: Kernel, *, decodes: bool) -> Layer:
    """A T5 block: RMSNorms, ReLU or a gated GELU; the decoder's reads the encoder, too."""
    length = shape.target if decodes else shape.source
    tokens, hidden = shape.rows * length, shape.hidden
    norms = 3 if decodes else 2
    wide = FLOAT32_BYTES if shape.weights < FLOAT32_BYTES else 0  # the input once more
    per_norm = hidden * (2 * shape.weights + wide) + FLOAT32_BYTES
    readers = [3, 2 if shape.gated else 1] + [1] * decodes
    stream = tokens * (norms * per_norm + hidden * sum(_read(shape, n) for n in readers))
    attention, scores = kept_by_attention(shape, own, length, length, biased=True)
    if decodes:
        crossed, more = kept_by_attention(shape, crossing, shape.source, length)
        attention, scores = attention + crossed, scores + more
        if shape.cast:  # keys and values each cast the encoder's result
            stream += shape.rows * shape.source * hidden * 2 * shape.compute
    inner = 7 if shape.gated else 1
    inner += (1 if shape.gated else 2) if shape.dropout else int(shape.cast and not shape.gated)
    kept = tokens * inner * shape.inner * shape.compute
    queries = shape.queries * (3 if decodes else 1)
    crossed_keys = 2 * shape.rows * shape.source * shape.queries if decodes else 0
    results = 2 * shape.queries + hidden
    linear = tokens * (results * (norms - 1) + 2 * shape.queries + hidden + shape.inner)
    return Layer(
        stream=stream,
        attention=attention,
        scores=scores,
        feed_forward=kept,
        dropout=norms * tokens * hidden * shape.mask_bytes if shape.dropout else 0,
        needed=(tokens * (queries + 3 * shape.queries + norms * hidden) + crossed_keys)
        * shape.compute,
        dear=(linear + crossed_keys) * shape.compute,
        working=_working(shape, length, own, kept),
    )


LAYERS: dict[str, Callable[[Shape, Kernel], Layer]] = {
    "llama": _llama_layer,
    "qwen2": _llama_layer,
    "qwen3": _llama_layer,
    "mixtral": _llama_layer,
    "bert": _bert_layer,
    "gpt2": _gpt2_layer,
}
"""`model.family` -> what one of its layers keeps; T5 has two kinds."""


INDEX_BYTES = 8
"""Of a token's id, and of a label."""


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch on one device."""

    kept: int
    """By all layers, embeddings and the head, when the forward pass ends."""
    needed: int
    """Of `kept`, what no implementation can do without."""
    passing: int
    """One layer's, computed once more in the backward pass; 0 without checkpointing."""
    working: int
    """Gradients of activations that are alive at once."""
    casts: int
    """Autocast's 16-bit copies of weights, alive through the forward pass."""
    casts_kept: int
    """Of these, what the backward pass keeps."""
    logits_forward: int
    """Logits in every format they have at the end of the forward pass."""
    logits_backward: int
    """Probabilities and their gradients at the start of the backward pass."""
    logits_needed: int
    """Of `logits_backward`, what any implementation of the unfused loss has."""
    one_layer: int
    """What a single layer keeps, for passes without gradients and the last layer of a backward."""
    offloaded: int = 0
    """Of what would be kept, what waits in host memory."""


def attention_kernel(plan: Plan, shape: Shape) -> Kernel:
    """Which kind of attention kernel computes."""
    option, backend = plan.config.attention.option, plan.config.attention.backend
    if option == "eager":
        return "eager"
    if option == "sdpa" and backend is Backend.math:
        return "math"
    if option == "sdpa" and shape.on_cpu and shape.dropout:
        return "math"  # PyTorch's CPU kernel has no dropout
    return "fused"


def activations(plan: Plan, shape: Shape, parts: tuple[Weight, ...]) -> Activations:
    """What the forward pass of one micro-batch keeps and needs.

    Args:
        plan: of the run.
        shape: of the forward pass.
        parts: `eke.models.sizes.training_structure` of the plan's configuration.
    """
    config = plan.config
    each = _adapted(config, shape, stacks(shape, attention_kernel(plan, shape)), parts)
    outer = _outside(config, shape)
    casts = _cast_bytes(shape, parts)
    kept, passing, share = _checkpointed(config, shape, each)
    layer = max((stack.layer.kept for stack in each), default=0)
    logits = _logits(config, shape)
    offloaded = 0
    if config.memory.activation_offload and not shape.on_cpu:
        offloaded, kept, share = kept, 0, 0.0  # copies of weights are made again
        passing = max(passing, layer)
    needed = sum(s.layer.needed * s.count for s in each)
    if trains_adapters(config) or config.memory.checkpointing is not Checkpointing.off:
        needed = 0
    return Activations(
        kept=kept + outer,
        needed=min(needed, kept),
        passing=passing,
        working=max((stack.layer.working for stack in each), default=0),
        casts=casts,
        casts_kept=int(casts * share),
        logits_forward=logits[0],
        logits_backward=logits[1],
        logits_needed=logits[2],
        one_layer=layer,
        offloaded=offloaded,
    )


def _checkpointed(config: Config, shape: Shape, each: tuple[Stack, ...]) -> tuple[int, int, float]:
    """Bytes kept by all layers, by the one that is recomputed, and the share of layers kept."""
    memory = config.memory
    whole = sum(stack.layer.kept * stack.count for stack in each)
    if memory.checkpointing is Checkpointing.off:
        return whole, 0, 1.0
    total = sum(stack.count for stack in each)
    kept, first, number = 0, 0, 0
    for stack in each:
        tokens = shape.rows * (shape.target if number else shape.source)
        inputs = tokens * shape.hidden * shape.weights
        dear = stack.layer.dear if memory.checkpointing is Checkpointing.selective else 0
        # Every nth of all layers in a row, T5's encoder first.
        repeated = len(range(-first % memory.every_n, stack.count, memory.every_n))
        kept += repeated * (inputs + dear) + (stack.count - repeated) * stack.layer.kept
        first, number = first + stack.count, number + 1
    repeated = len(range(0, total, memory.every_n))
    selective = memory.checkpointing is Checkpointing.selective
    again = [s.layer.kept - s.layer.dear if selective else s.layer.kept for s in each]
    # Where the last layer is kept, the first recomputation has its room.
    freed = (total - 1) % memory.every_n * each[-1].layer.kept if each else 0
    passing = max(0, max([0, *again]) - freed)
    return min(kept, whole), passing, 1 - repeated / max(1, total)


def _outside(config: Config, shape: Shape) -> int:
    """Ids, embeddings' norms and masks, rotary positions, and what the head reads."""
    tokens, hidden = shape.tokens, shape.hidden
    positions = tokens * 3 * INDEX_BYTES + shape.rows * shape.target * 2 * INDEX_BYTES
    norm = hidden * (FLOAT32_BYTES + 2 * shape.weights + (shape.compute if shape.cast else 0))
    outer = positions + tokens * norm
    if shape.family in ("llama", "qwen2", "qwen3", "mixtral"):
        outer += 2 * shape.source * (shape.queries // shape.heads) * FLOAT32_BYTES
    if shape.family == "bert":
        head = 3 if config.task.option == "masked_lm" else 0
        outer += tokens * hidden * head * (shape.compute + shape.weights)
    if shape.family == "t5":
        outer += shape.rows * shape.target * norm
        outer += 2 * shape.heads * shape.target * shape.source * (FLOAT32_BYTES + INDEX_BYTES)
    if shape.dropout and shape.family in ("bert", "gpt2", "t5"):
        outer += tokens * hidden * shape.mask_bytes
    return outer


def _cast_bytes(shape: Shape, parts: tuple[Weight, ...]) -> int:
    """16-bit copies of what linear layers, and stacks of experts, multiply with."""
    if not shape.cast:
        return 0
    return sum(
        shape.compute * prod(w.shape)
        for w in parts
        if w.tokens is not Tokens.none and len(w.shape) > 1 and not w.four_bits
    )


def _logits(config: Config, shape: Shape) -> tuple[int, int, int]:
    """Bytes of logits at the end of the forward pass, in the backward pass, and at least.

    `eke.training.model.loss.loss_sum`: the logits, their float32 copy where they are
    narrower, and the logarithms of probabilities; then these, the loss's gradient and that of the
    logits.
    """
    if is_classification(config):
        return 0, 0, 0
    rows = most_predicted(config, shape.rows, shape.target)
    if config.kernels.fused_linear_cross_entropy:
        # Chunks as large as the input (LinearCrossEntropyOptions, `aspect_ratio`), and gradients
        # of the weight, computed in the forward pass; in 16 bits also summed up in float32.
        copies = 2 if shape.compute == FLOAT32_BYTES else 3
        of_head = copies - 2 if trains_adapters(config) else copies
        chunks = (copies * rows + of_head * shape.vocabulary) * shape.hidden * FLOAT32_BYTES
        return chunks, chunks, 0
    numbers = rows * shape.vocabulary
    copies = shape.compute if shape.compute < FLOAT32_BYTES else 0
    forward = numbers * (copies + 2 * FLOAT32_BYTES)
    return forward, numbers * 3 * FLOAT32_BYTES, numbers * 2 * FLOAT32_BYTES


def _adapted(
    config: Config, shape: Shape, each: tuple[Stack, ...], parts: tuple[Weight, ...]
) -> tuple[Stack, ...]:
    """Stacks whose own weights are frozen: fewer operands kept, and those of the adapters.

    A frozen linear layer keeps no input, a frozen norm no normalised one; each adapter keeps its
    input in its own format (peft's `_cast_input_dtype`) and its inner result.
    """
    if not trains_adapters(config):
        return each
    total = sum(stack.count for stack in each) or 1
    rank = config.peft.r if isinstance(config.peft, Lora) else 0
    # Of matrix A, (r, in): what is read; those of one input are one tensor without casts.
    read = [w.shape[1] for w in parts if w.is_adapter and len(w.shape) == 2 and w.shape[0] == rank]
    narrow = shape.cast or shape.weights < FLOAT32_BYTES
    width = FLOAT32_BYTES if not shape.cast else shape.compute
    inputs = sum(read) * width // total if narrow else 0
    results = len(read) * rank * width // total
    tokens = shape.rows * max(shape.source, shape.target if shape.decoder_layers else 0)
    changed = []
    for stack in each:
        layer = stack.layer
        lost = 2 * tokens * shape.hidden * shape.weights
        added = tokens * (inputs + results)
        frozen = Layer(
            stream=max(0, layer.stream - lost) if rank == 0 or not narrow else lost,
            attention=layer.attention,
            scores=layer.scores,
            feed_forward=layer.feed_forward + added,
            dropout=layer.dropout,
            needed=0,
            dear=layer.dear + added,
            working=layer.working,
        )
        changed.append(Stack(frozen, stack.count))
    return tuple(changed)
