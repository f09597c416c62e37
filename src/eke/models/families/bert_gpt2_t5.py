"""BERT, GPT-2 and T5: families with dropout outside of attention.

BERT is an encoder with norms after each sublayer, GPT-2 a decoder with norms before. Both have
learned positions. T5 is an encoder-decoder with relative positions, RMSNorm and no biases.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, cast

from eke.common.text import PAD
from eke.config.schema import BertModel, Config, GPT2Model, PretrainedModel, T5Model
from eke.models.families.family_record import (
    FLOAT32_BYTES,
    INDEX_BYTES,
    MAIN,
    AttentionLayers,
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
    embedding_and_lm_head,
    head,
    head_width,
    kept_by_attention,
    layer_norm,
    layers,
    norm,
    table,
    working_bytes,
)


def _bert_structure(config: Config) -> Structure:
    model = cast(BertModel, config.model)
    hidden = model.hidden_size
    around, lm_head = "bert.embeddings", "cls.predictions"
    names = f"{around}.word_embeddings", f"{lm_head}.decoder"
    first, last = embedding_and_lm_head(config, *names)
    weights = [
        *first,
        table(model.max_position_embeddings, hidden, f"{around}.position_embeddings"),
        table(model.type_vocab_size, hidden, f"{around}.token_type_embeddings"),
        *layer_norm(hidden, f"{around}.LayerNorm"),
        *layers("bert.encoder.layer", model.num_hidden_layers, _bert_weights(model)),
    ]
    if labels := config.targets.num_labels:
        for name, out in {"bert.pooler.dense": hidden, "classifier": labels}.items():
            weights += head(out, hidden, Tokens.sample, name, bias=True, is_head=True)
    else:
        weights += head(hidden, hidden, Tokens.source, f"{lm_head}.transform.dense", bias=True)
        weights += [*layer_norm(hidden, f"{lm_head}.transform.LayerNorm"), *last]
        biases = [f"{lm_head}.decoder.bias", f"{lm_head}.bias"]
        if not model.tie_word_embeddings:
            # transformers 5 then has a second, unused bias `cls.predictions.bias`.
            weights.append(Weight((model.vocab_size,), trained=False, names=(biases.pop(),)))
        weights.append(Weight((model.vocab_size,), names=tuple(biases)))
    attention = AttentionLayers(model.num_hidden_layers, hidden, causal=False)
    return Structure(tuple(weights), (attention,))


def _bert_weights(model: BertModel) -> Iterator[Weight]:
    hidden, inner = model.hidden_size, model.intermediate_size
    square = ("self.query", "self.key", "self.value", "output.dense")
    shapes = {f"attention.{name}": (hidden, hidden) for name in square}
    shapes |= {"intermediate.dense": (inner, hidden), "output.dense": (hidden, inner)}
    for name, (out, inp) in shapes.items():
        yield Weight((out, inp), Tokens.source, module=name)
        yield Weight((out,), module=name)
    yield from layer_norm(hidden, "attention.output.LayerNorm")
    yield from layer_norm(hidden, "output.LayerNorm")


def _norm_stacks(
    shape: Shape, kernel: Kernel, readers: tuple[int, int], inner: int
) -> tuple[Stack, ...]:
    """Return activations of BERT and GPT-2: two LayerNorms, which save their input, no gates."""
    tokens, hidden = shape.tokens, shape.hidden
    per_norm = hidden * shape.weights + 2 * FLOAT32_BYTES
    stream = tokens * (2 * per_norm + hidden * sum(shape.read(n) for n in readers))
    attention = kept_by_attention(shape, kernel, shape.source, shape.source)
    dropped = 2 * shape.dropped
    operands = 4 * hidden + 2 * hidden + shape.inner
    kept = tokens * inner * shape.inner * shape.compute
    layer = Layer(
        stream=stream,
        attention=attention,
        feed_forward=kept,
        dropout=dropped,
        needed=tokens * operands * shape.compute,
        dear=tokens * (6 * hidden + shape.inner) * shape.compute,
        working=working_bytes(shape, shape.source, kernel, kept + dropped // 2),
    )
    return (Stack(layer, shape.layers),)


def _bert_outside(shape: Shape, task: str) -> int:
    """Return bytes of the transformation before the output projection, and of the dropout."""
    head = 3 if task == "masked_lm" else 0
    return shape.tokens * shape.hidden * head * (shape.compute + shape.weights) + shape.dropped


def _bert_arguments(config: Config) -> dict[str, Any]:
    sizes = (*MAIN, "max_position_embeddings", "type_vocab_size")
    dropouts = ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout")
    model = config.model
    return {key: getattr(model, key) for key in sizes} | dict.fromkeys(dropouts, model.dropout)


BERT = Family(
    name="bert",
    tasks=("masked_lm", "sequence_classification"),
    structure=_bert_structure,
    # Query, key and value cast their input. GELU saves its input, the next layer the result.
    stacks=partial(_norm_stacks, readers=(3, 1), inner=2),
    outside=_bert_outside,
    widths=(),
    softmax=Softmax.autocast,
    ia3_targets=("key", "value", "output.dense"),
    scaled_inputs=("output.dense",),
    smallest="tiny_bert",
    config_class="BertConfig",
    config_arguments=_bert_arguments,
    checkpoints={
        "bert": partial(
            Reader.main, max_position_embeddings=512, type_vocab_size=2, tie_word_embeddings=True
        )
    },
    layer_tensor=r"(?:^|\.)encoder\.layer\.(\d+)\.",
    embedding_tensor="embeddings.word_embeddings.weight",
    inner_tensor="layer.0.intermediate.dense.weight",
)


def _gpt2_structure(config: Config) -> Structure:
    model = cast(GPT2Model, config.model)
    hidden = model.hidden_size
    first, last = embedding_and_lm_head(config, "transformer.wte", "lm_head")
    weights = [
        *first,
        table(model.max_position_embeddings, hidden, "transformer.wpe"),
        *layers("transformer.h", model.num_hidden_layers, _gpt2_weights(model)),
        *layer_norm(hidden, "transformer.ln_f"),
        *last,
    ]
    if labels := config.targets.num_labels:
        weights += head(labels, hidden, Tokens.source, "score", bias=False, is_head=True)
    attention = AttentionLayers(model.num_hidden_layers, hidden, causal=True)
    return Structure(tuple(weights), (attention,))


def _gpt2_weights(model: GPT2Model) -> Iterator[Weight]:
    hidden, inner = model.hidden_size, model.intermediate_size
    # GPT-2's Conv1D stores [in, out], which matters for Adafactor's rows and columns.
    shapes = {
        "attn.c_attn": (hidden, 3 * hidden),
        "attn.c_proj": (hidden, hidden),
        "mlp.c_fc": (hidden, inner),
        "mlp.c_proj": (inner, hidden),
    }
    for name, (inp, out) in shapes.items():
        yield Weight((inp, out), Tokens.source, module=name)
        yield Weight((out,), module=name)
    yield from layer_norm(hidden, "ln_1")
    yield from layer_norm(hidden, "ln_2")


def _gpt2_arguments(config: Config) -> dict[str, Any]:
    model = config.model
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model.dropout)
    found = {key: getattr(model, key) for key in sizes}
    return {**found, "n_inner": model.intermediate_size, **dropouts}


def _gpt2_read(reader: Reader) -> Sizes:
    sizes = reader.main(
        intermediate_size=None, max_position_embeddings=1024, tie_word_embeddings=True
    )
    return {**sizes, "intermediate_size": reader.count("n_inner", 4 * sizes["hidden_size"])}


GPT2 = Family(
    name="gpt2",
    tasks=("causal_lm", "sequence_classification"),
    structure=_gpt2_structure,
    # Query, key and value share one projection. GELU as a formula saves five tensors.
    stacks=partial(_norm_stacks, readers=(1, 1), inner=5),
    outside=lambda shape, task: shape.dropped,  # the embedding's dropout
    widths=(),
    is_decoder=True,
    stores_transposed=True,
    softmax=Softmax.cast_back,
    ia3_targets=("c_attn", "mlp.c_proj"),  # keys and values, and queries in the same layer
    scaled_inputs=("mlp.c_proj",),
    smallest="tiny_gpt2",
    config_class="GPT2Config",
    config_arguments=_gpt2_arguments,
    checkpoints={"gpt2": _gpt2_read},
    layer_tensor=r"(?:^|\.)h\.(\d+)\.",
    embedding_tensor="wte.weight",
    inner_tensor="h.0.mlp.c_proj.weight",
)


def _t5_structure(config: Config) -> Structure:
    model = cast(T5Model, config.model)
    hidden, heads = model.hidden_size, model.num_attention_heads
    encoders = model.num_hidden_layers
    decoders = model.num_decoder_layers or encoders
    labels = config.targets.num_labels
    base = "transformer." if labels else ""
    names = [f"{base}{name}" for name in ("shared", "encoder.embed_tokens", "decoder.embed_tokens")]
    # transformers 5 ties embedding and projection unless a checkpoint has both (T5 v1.1, Flan-T5).
    # Otherwise `tie_word_embeddings=false` only disables T5Config.scale_decoder_outputs.
    untied = isinstance(model, PretrainedModel) and not model.tie_word_embeddings and not labels
    weights = [table(model.vocab_size, hidden, *names)]
    if not labels and not untied:
        weights = [table(model.vocab_size, hidden, *names, "lm_head", tokens=Tokens.target)]
    stacks = (("encoder", encoders, Tokens.source), ("decoder", decoders, Tokens.target))
    for part, count, tokens in stacks:
        # The first layer of each stack has the relative positions. A norm ends each stack.
        relative = f"{base}{part}.block.0.layer.0.SelfAttention.relative_attention_bias"
        weights.append(table(32, heads, relative))  # T5Config.relative_attention_num_buckets
        weights += layers(f"{base}{part}.block", count, _t5_weights(model, tokens))
        weights.append(norm(hidden, f"{base}{part}.final_layer_norm"))
    if untied:
        weights += head(model.vocab_size, hidden, Tokens.target, "lm_head", bias=False)
    for name, out in {"dense": hidden, "out_proj": labels}.items() if labels else ():
        name = f"classification_head.{name}"
        weights += head(out, hidden, Tokens.sample, name, bias=True, is_head=True)
    width = heads * head_width(model)
    attention = (
        AttentionLayers(encoders, width, causal=False),
        AttentionLayers(decoders, width, Tokens.target, Tokens.target, causal=True),
        AttentionLayers(decoders, width, Tokens.target, Tokens.source, causal=False),
    )
    return Structure(tuple(weights), attention)


def _t5_weights(model: T5Model, tokens: Tokens) -> Iterator[Weight]:
    """Yield one block of the stack for `tokens`. Decoder blocks have cross-attention."""
    hidden, inner = model.hidden_size, model.intermediate_size
    yield from _t5_attention(model, "layer.0.SelfAttention", queries=tokens, keys=tokens)
    last = 1
    if tokens is Tokens.target:
        yield from _t5_attention(model, "layer.1.EncDecAttention", tokens, Tokens.source)
        last = 2
    inputs = ("wi_0", "wi_1") if model.gated else ("wi",)
    shapes = {**dict.fromkeys(inputs, (inner, hidden)), "wo": (hidden, inner)}
    for name, (out, inp) in shapes.items():
        yield Weight((out, inp), tokens, module=f"layer.{last}.DenseReluDense.{name}")
    yield norm(hidden, f"layer.{last}.layer_norm")


def _t5_attention(model: T5Model, name: str, queries: Tokens, keys: Tokens) -> Iterator[Weight]:
    hidden, width = model.hidden_size, model.num_attention_heads * head_width(model)
    for part, tokens in {"q": queries, "k": keys, "v": keys}.items():
        yield Weight((width, hidden), tokens, module=f"{name}.{part}")
    yield Weight((hidden, width), queries, module=f"{name}.o")
    yield norm(hidden, f"{name.rpartition('.')[0]}.layer_norm")


def _t5_stacks(shape: Shape, kernel: Kernel) -> tuple[Stack, ...]:
    own: Kernel = kernel
    if kernel == "fused" and shape.on_cpu:
        own = "math"  # PyTorch's CPU kernel does not support a bias with gradient
    encoder = _t5_layer(shape, own, kernel, decodes=False)
    decoder = _t5_layer(shape, own, kernel, decodes=True)
    return Stack(encoder, shape.layers), Stack(decoder, shape.decoder_layers)


def _t5_layer(shape: Shape, own: Kernel, crossing: Kernel, *, decodes: bool) -> Layer:
    """Return activations of a T5 block: RMSNorms, ReLU or gated GELU, cross-attention."""
    length = shape.target if decodes else shape.source
    tokens, hidden = shape.rows * length, shape.hidden
    norms = 3 if decodes else 2
    wide = FLOAT32_BYTES if shape.weights < FLOAT32_BYTES else 0  # float32 copy of the input
    per_norm = hidden * (2 * shape.weights + wide) + FLOAT32_BYTES
    readers = [3, 2 if shape.gated else 1] + [1] * decodes
    stream = tokens * (norms * per_norm + hidden * sum(shape.read(n) for n in readers))
    attention = kept_by_attention(shape, own, length, length, biased=True)
    if decodes:
        attention += kept_by_attention(shape, crossing, shape.source, length)
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
        feed_forward=kept,
        dropout=norms * tokens * hidden * shape.mask_bytes if shape.dropout else 0,
        needed=(tokens * (queries + 3 * shape.queries + norms * hidden) + crossed_keys)
        * shape.compute,
        dear=(linear + crossed_keys) * shape.compute,
        working=working_bytes(shape, length, own, kept),
    )


def _t5_outside(shape: Shape, task: str) -> int:
    """Return bytes of the decoder's norm, relative positions and the embedding's dropout."""
    hidden = shape.hidden
    norm = hidden * (FLOAT32_BYTES + 2 * shape.weights + (shape.compute if shape.cast else 0))
    found = shape.rows * shape.target * norm
    found += 2 * shape.heads * shape.target * shape.source * (FLOAT32_BYTES + INDEX_BYTES)
    return found + shape.dropped


def _t5_arguments(config: Config) -> dict[str, Any]:
    """Return arguments of T5Config, which has one dropout for the model and one for the head."""
    model = cast(T5Model, config.model)
    return {
        "d_model": model.hidden_size,
        "d_kv": head_width(model),
        "d_ff": model.intermediate_size,
        "num_layers": model.num_hidden_layers,
        "num_decoder_layers": model.num_decoder_layers,
        "num_heads": model.num_attention_heads,
        "feed_forward_proj": "gated-gelu" if model.gated else "relu",
        "dropout_rate": model.dropout,
        "classifier_dropout": model.dropout,
        "decoder_start_token_id": PAD,
    }


def _t5_read(reader: Reader) -> Sizes:
    return {
        **reader.main(num_decoder_layers=None, tie_word_embeddings=True),
        "head_dim": reader.count("d_kv", 64),
        "gated": str(reader.raw.get("feed_forward_proj") or "relu").startswith("gated"),
    }


T5 = Family(
    name="t5",
    tasks=("seq2seq_lm", "sequence_classification"),
    structure=_t5_structure,
    stacks=_t5_stacks,
    outside=_t5_outside,
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
    config_arguments=_t5_arguments,
    checkpoints={"t5": _t5_read},
    layer_tensor=r"(?:^|\.)encoder\.block\.(\d+)\.",
    embedding_tensor="shared.weight",
)
