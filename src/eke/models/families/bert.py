"""BERT: an encoder with learned positions and LayerNorm after each sublayer."""

from collections.abc import Iterator
from typing import Any, cast

from eke.config.schema import BertModel, Config
from eke.models.families.family_record import (
    Family,
    Kernel,
    Layer,
    Reader,
    Shape,
    Sizes,
    Softmax,
    Stack,
    embedding_and_lm_head,
    is_classification,
    kept_by_attention,
    num_labels,
    working_bytes,
)
from eke.models.families.tensors import (
    FLOAT32_BYTES,
    Attention,
    Structure,
    Tokens,
    Weight,
    head,
    layer_norm,
    linear,
    table,
)


def _structure(config: Config) -> Structure:
    """BertForMaskedLM and BertForSequenceClassification."""
    model = cast(BertModel, config.model)
    hidden = model.hidden_size
    weights = [
        *embedding_and_lm_head(config),
        table(model.max_position_embeddings, hidden),
        table(model.type_vocab_size, hidden),
        *layer_norm(hidden),
        *(w for _ in range(model.num_hidden_layers) for w in _weights(model)),
    ]
    if is_classification(config):
        weights += head(hidden, hidden, Tokens.sample, bias=True, is_head=True)  # the pooler
        weights += head(num_labels(config), hidden, Tokens.sample, bias=True, is_head=True)
    else:
        weights += head(hidden, hidden, Tokens.source, bias=True)
        weights += [*layer_norm(hidden), Weight((model.vocab_size,))]  # bias of the projection
        if not model.tie_word_embeddings:
            # transformers 5 then keeps a second bias, `cls.predictions.bias`, that nothing reads.
            weights.append(Weight((model.vocab_size,), trained=False))
    attention = Attention(
        model.num_hidden_layers, hidden, Tokens.source, Tokens.source, causal=False
    )
    return Structure(tuple(weights), (attention,))


def _weights(model: BertModel) -> Iterator[Weight]:
    hidden, inner = model.hidden_size, model.intermediate_size
    shapes = {
        "attention.self.query": (hidden, hidden),
        "attention.self.key": (hidden, hidden),
        "attention.self.value": (hidden, hidden),
        "attention.output.dense": (hidden, hidden),
        "intermediate.dense": (inner, hidden),
        "output.dense": (hidden, inner),
    }
    for name, (out, inp) in shapes.items():
        yield from linear(out, inp, Tokens.source, bias=True, module=name)
    yield from layer_norm(hidden)
    yield from layer_norm(hidden)


def norm_layer(shape: Shape, kernel: Kernel, readers: tuple[int, int], inner: int) -> Layer:
    """BERT and GPT-2: two LayerNorms, which keep their input, and a plain feed-forward."""
    tokens, hidden = shape.tokens, shape.hidden
    per_norm = hidden * shape.weights + 2 * FLOAT32_BYTES
    stream = tokens * (2 * per_norm + hidden * sum(shape.read(n) for n in readers))
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
        working=working_bytes(shape, shape.source, kernel, kept + dropped // 2),
    )


def _stacks(shape: Shape, kernel: Kernel) -> tuple[Stack, ...]:
    """Query, key and value cast their input; GELU keeps its input, the next layer its result."""
    return (Stack(norm_layer(shape, kernel, readers=(3, 1), inner=2), shape.layers),)


def _outside(shape: Shape, task: str) -> int:
    """The transformation before the projection onto the vocabulary, and the embedding's dropout."""
    head = 3 if task == "masked_lm" else 0
    found = shape.tokens * shape.hidden * head * (shape.compute + shape.weights)
    return found + (shape.tokens * shape.hidden * shape.mask_bytes if shape.dropout else 0)


def _arguments(config: Config) -> dict[str, Any]:
    model = cast(BertModel, config.model)
    return {
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "intermediate_size": model.intermediate_size,
        "max_position_embeddings": model.max_position_embeddings,
        "type_vocab_size": model.type_vocab_size,
        "hidden_dropout_prob": model.dropout,
        "attention_probs_dropout_prob": model.dropout,
        "classifier_dropout": model.dropout,
    }


def _read(reader: Reader) -> Sizes:
    return {
        **reader.main(),
        "max_position_embeddings": reader.count("max_position_embeddings", 512),
        "type_vocab_size": reader.count("type_vocab_size", 2),
        "tie_word_embeddings": reader.flag("tie_word_embeddings", True),
    }


BERT = Family(
    name="bert",
    tasks=("masked_lm", "sequence_classification"),
    structure=_structure,
    stacks=_stacks,
    outside=_outside,
    widths=(),
    softmax=Softmax.autocast,
    ia3_targets=("key", "value", "output.dense"),
    scaled_inputs=("output.dense",),
    smallest="tiny_bert",
    config_class="BertConfig",
    config_arguments=_arguments,
    checkpoints={"bert": _read},
    layer_tensor=r"(?:^|\.)encoder\.layer\.(\d+)\.",
    embedding_tensor="embeddings.word_embeddings.weight",
    inner_tensor="layer.0.intermediate.dense.weight",
)
