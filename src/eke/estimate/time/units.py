"""Numbers in the tensors of one micro-batch: what counted bytes are bytes per."""

from eke.estimate.memory.shape import Shape

Units = dict[str, float]
"""Kind of tensor -> numbers in it."""


def stacks_of(shape: Shape) -> dict[str, int]:
    """Stack -> its layers."""
    if shape.family == "t5":
        return {"encoder": shape.layers, "decoder": shape.decoder_layers}
    return {"layer": shape.layers}


def layer_weights(shape: Shape, stack: str) -> float:
    """Numbers in the matrices of one layer; of experts all."""
    hidden, inner = shape.hidden, shape.inner
    attention = 2.0 * hidden * (shape.queries + shape.keys)
    if stack == "decoder":
        attention *= 2
    plain = shape.family in ("bert", "gpt2") or (shape.family == "t5" and not shape.gated)
    feed_forward = (2 if plain else 3) * hidden * inner
    if shape.experts:
        return attention + shape.experts * (feed_forward + hidden)
    return float(attention + feed_forward)


def layer_units(shape: Shape, stack: str) -> Units:
    """Numbers of one layer's tensors.

    Args:
        shape: of the forward pass.
        stack: `layer`; of T5 `encoder` or `decoder`.
    """
    length = shape.target if stack == "decoder" else shape.source
    tokens = shape.rows * length
    found: dict[str, float] = {
        "stream": tokens * shape.hidden,
        "inner": tokens * shape.inner,
        "heads": tokens * shape.heads,
        "scores": tokens * shape.heads * length,
        "masks": tokens * length,
        "weights": layer_weights(shape, stack),
    }
    if shape.family not in ("bert", "gpt2"):  # whose heads are as wide together as the stream
        found["queries"] = tokens * shape.queries
    if shape.family not in ("bert", "gpt2", "t5"):  # whose keys are as wide as queries
        found["keys"] = tokens * shape.keys
    if stack == "decoder":
        found["read"] = shape.rows * shape.source * shape.hidden
        found["crossed"] = shape.rows * shape.source * shape.queries
        found["crossings"] = tokens * shape.heads * shape.source
    if shape.experts:
        found["inner"] = tokens * shape.chosen * shape.inner
        found["routed"] = tokens * shape.chosen * shape.hidden
    return found


def outer_units(shape: Shape, classifies: bool) -> Units:
    """Numbers of what is around the layers: embedding, last norm, head and loss.

    Args:
        shape: of the forward pass.
        classifies: one label a sample, and no logits over the vocabulary.
    """
    tokens = shape.rows * shape.target
    found: dict[str, float] = {
        "stream": tokens * shape.hidden,
        "masks": tokens * shape.target,
        "table": shape.vocabulary * shape.hidden,
        "widths": shape.hidden * shape.hidden,
    }
    if not classifies:
        found["logits"] = shape.predicted * tokens * shape.vocabulary
    if shape.family == "t5":
        found["read"] = shape.rows * shape.source * shape.hidden
        found["biases"] = shape.heads * (shape.target**2 + shape.source**2)
    return found
