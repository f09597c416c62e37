"""What autograd keeps of one Transformer layer, tensor by tensor, as transformers 5.23 computes it.

The method is that of Korthikanti et al. 2022, arXiv:2205.05198, section 4.1 (whose 34 s b h holds
for one GPT layer in 16 bits with dropout); the tensors are read from each family's modelling_*.py,
and their sums agree with what saved-tensor hooks count on a CPU (tests/unit/estimate/memory).
An operation that casts keeps nothing; a matrix multiplication keeps its operands; a product keeps
both factors where both need gradients. Under autocast each linear layer casts its own input.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from eke.estimate.memory.shape import Shape
from eke.models.sizes import FLOAT32_BYTES

Kernel = Literal["fused", "math", "eager"]
"""Attention that never has the scores; PyTorch's plain path, in float32; a model's own."""


@dataclass(frozen=True)
class Layer:
    """Bytes that one layer keeps for the backward pass, per micro-batch."""

    stream: int
    """Residual stream, norms, and the inputs of linear layers."""
    attention: int
    """Queries, keys, values, results, and what the kernel keeps beside."""
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
