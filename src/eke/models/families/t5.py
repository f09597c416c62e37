"""T5: an encoder-decoder with relative positions, RMSNorm and no biases."""

from collections.abc import Iterator
from typing import Any, cast

from eke.common.text import PAD
from eke.config.schema import Config, PretrainedModel, T5Model
from eke.models.families.family_record import (
    FLOAT32_BYTES,
    INDEX_BYTES,
    Attention,
    Family,
    Kernel,
    Layer,
    Reader,
    Shape,
    Sizes,
    Softmax,
    Stack,
    Structure,
    Tokens,
    Weight,
    head,
    head_width,
    is_classification,
    kept_by_attention,
    linear,
    num_labels,
    table,
    working_bytes,
)

RELATIVE_BUCKETS = 32
"""Rows of the relative position bias: transformers' T5Config.relative_attention_num_buckets."""


def _structure(config: Config) -> Structure:
    """T5ForConditionalGeneration and T5ForSequenceClassification (which has a decoder too).

    transformers 5 always ties T5's embeddings; `tie_word_embeddings=false` only stops it from
    scaling the logits (T5Config.scale_decoder_outputs).
    """
    model = cast(T5Model, config.model)
    hidden, heads = model.hidden_size, model.num_attention_heads
    encoders = model.num_hidden_layers
    decoders = model.num_decoder_layers or encoders
    classify = is_classification(config)
    weights = [
        table(model.vocab_size, hidden, Tokens.none if classify else Tokens.target),
        *(w for _ in range(encoders) for w in _weights(model, Tokens.source)),
        *(w for _ in range(decoders) for w in _weights(model, Tokens.target)),
    ]
    if isinstance(model, PretrainedModel) and not model.tie_word_embeddings and not classify:
        # Of a checkpoint with both, transformers 5 keeps both: T5 v1.1, Flan-T5.
        weights[0] = table(model.vocab_size, hidden)
        weights += head(model.vocab_size, hidden, Tokens.target, bias=False)
    # Relative positions live in the first layer of each stack; a norm ends each stack.
    weights += [table(RELATIVE_BUCKETS, heads), Weight((hidden,))] * 2
    if classify:
        weights += head(hidden, hidden, Tokens.sample, bias=True, is_head=True)
        weights += head(num_labels(config), hidden, Tokens.sample, bias=True, is_head=True)
    width = heads * head_width(model)
    attention = (
        Attention(encoders, width, Tokens.source, Tokens.source, causal=False),
        Attention(decoders, width, Tokens.target, Tokens.target, causal=True),
        Attention(decoders, width, Tokens.target, Tokens.source, causal=False),
    )
    return Structure(tuple(weights), attention)


def _weights(model: T5Model, tokens: Tokens) -> Iterator[Weight]:
    """One block of the stack that reads `tokens`; the decoder's has cross-attention."""
    hidden, inner = model.hidden_size, model.intermediate_size
    yield from _attention_weights(model, "layer.0.SelfAttention", queries=tokens, keys=tokens)
    last = 1
    if tokens is Tokens.target:
        yield from _attention_weights(model, "layer.1.EncDecAttention", tokens, Tokens.source)
        last = 2
    inputs = ("wi_0", "wi_1") if model.gated else ("wi",)
    shapes = {**dict.fromkeys(inputs, (inner, hidden)), "wo": (hidden, inner)}
    for name, (out, inp) in shapes.items():
        module = f"layer.{last}.DenseReluDense.{name}"
        yield from linear(out, inp, tokens, bias=False, module=module)
    yield Weight((hidden,))


def _attention_weights(
    model: T5Model, name: str, queries: Tokens, keys: Tokens
) -> Iterator[Weight]:
    hidden, width = model.hidden_size, model.num_attention_heads * head_width(model)
    for part, tokens in {"q": queries, "k": keys, "v": keys}.items():
        yield from linear(width, hidden, tokens, bias=False, module=f"{name}.{part}")
    yield from linear(hidden, width, queries, bias=False, module=f"{name}.o")
    yield Weight((hidden,))


def _stacks(shape: Shape, kernel: Kernel) -> tuple[Stack, ...]:
    own: Kernel = kernel
    if kernel == "fused" and shape.on_cpu:
        own = "math"  # a learned bias has a gradient: PyTorch's CPU kernel takes none
    encoder = _layer(shape, own, kernel, decodes=False)
    decoder = _layer(shape, own, kernel, decodes=True)
    return Stack(encoder, shape.layers), Stack(decoder, shape.decoder_layers)


def _layer(shape: Shape, own: Kernel, crossing: Kernel, *, decodes: bool) -> Layer:
    """A T5 block: RMSNorms, ReLU or a gated GELU; the decoder's also attends to the encoder."""
    length = shape.target if decodes else shape.source
    tokens, hidden = shape.rows * length, shape.hidden
    norms = 3 if decodes else 2
    wide = FLOAT32_BYTES if shape.weights < FLOAT32_BYTES else 0  # the input once more
    per_norm = hidden * (2 * shape.weights + wide) + FLOAT32_BYTES
    readers = [3, 2 if shape.gated else 1] + [1] * decodes
    stream = tokens * (norms * per_norm + hidden * sum(shape.read(n) for n in readers))
    attention, scores = kept_by_attention(shape, own, length, length, biased=True)
    if decodes:
        crossed, more = kept_by_attention(shape, crossing, shape.source, length)
        attention, scores = attention + crossed, scores + more
        if shape.cast:  # keys and values each cast the encoder's output
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
        working=working_bytes(shape, length, own, kept),
    )


def _outside(shape: Shape, task: str) -> int:
    """The decoder's norm, the relative positions of both stacks, and the embedding's dropout."""
    hidden = shape.hidden
    norm = hidden * (FLOAT32_BYTES + 2 * shape.weights + (shape.compute if shape.cast else 0))
    found = shape.rows * shape.target * norm
    found += 2 * shape.heads * shape.target * shape.source * (FLOAT32_BYTES + INDEX_BYTES)
    return found + (shape.tokens * hidden * shape.mask_bytes if shape.dropout else 0)


def _arguments(config: Config) -> dict[str, Any]:
    """Of T5Config, which has one dropout for the whole model and one for its classifier."""
    model = cast(T5Model, config.model)
    return {
        "d_model": model.hidden_size,
        "d_kv": model.head_dim or model.hidden_size // model.num_attention_heads,
        "d_ff": model.intermediate_size,
        "num_layers": model.num_hidden_layers,
        "num_decoder_layers": model.num_decoder_layers,
        "num_heads": model.num_attention_heads,
        "feed_forward_proj": "gated-gelu" if model.gated else "relu",
        "dropout_rate": model.dropout,
        "classifier_dropout": model.dropout,
        "decoder_start_token_id": PAD,
    }


def _read(reader: Reader) -> Sizes:
    return {
        **reader.main(),
        "head_dim": reader.count("d_kv", 64),
        "num_decoder_layers": reader.count("num_decoder_layers"),
        "gated": str(reader.raw.get("feed_forward_proj") or "relu").startswith("gated"),
        "tie_word_embeddings": reader.flag("tie_word_embeddings", True),
    }


T5 = Family(
    name="t5",
    tasks=("seq2seq_lm", "sequence_classification"),
    structure=_structure,
    stacks=_stacks,
    outside=_outside,
    widths=("queries",),
    is_encoder_decoder=True,
    has_biases=False,
    has_score_bias=True,
    softmax=Softmax.autocast,
    ia3_targets=("k", "v", "wo"),
    scaled_inputs=("wo",),
    float32_layers=("wo",),
    smallest="tiny_t5",
    config_class="T5Config",
    config_arguments=_arguments,
    checkpoints={"t5": _read},
    layer_tensor=r"(?:^|\.)encoder\.block\.(\d+)\.",
    embedding_tensor="shared.weight",
)
