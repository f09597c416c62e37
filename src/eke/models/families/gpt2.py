"""GPT-2: a decoder with learned positions and LayerNorm before each sublayer."""

from collections.abc import Iterator
from typing import Any, cast

from eke.config.schema import Config, GPT2Model
from eke.models.families.bert import norm_layer
from eke.models.families.family_record import (
    MAIN,
    Family,
    Kernel,
    Reader,
    Shape,
    Sizes,
    Softmax,
    Stack,
    embedding_and_lm_head,
    is_classification,
    num_labels,
)
from eke.models.families.tensors import (
    Attention,
    Structure,
    Tokens,
    Weight,
    head,
    layer_norm,
    table,
)


def _structure(config: Config) -> Structure:
    """GPT2LMHeadModel and GPT2ForSequenceClassification."""
    model = cast(GPT2Model, config.model)
    hidden = model.hidden_size
    weights = [
        *embedding_and_lm_head(config),
        table(model.max_position_embeddings, hidden),
        *(w for _ in range(model.num_hidden_layers) for w in _weights(model)),
        *layer_norm(hidden),
    ]
    if is_classification(config):
        weights += head(num_labels(config), hidden, Tokens.source, bias=False, is_head=True)
    attention = Attention(
        model.num_hidden_layers, hidden, Tokens.source, Tokens.source, causal=True
    )
    return Structure(tuple(weights), (attention,))


def _weights(model: GPT2Model) -> Iterator[Weight]:
    hidden, inner = model.hidden_size, model.intermediate_size
    # GPT-2's Conv1D stores [in, out]: the order matters to Adafactor's rows and columns.
    shapes = {
        "attn.c_attn": (hidden, 3 * hidden),
        "attn.c_proj": (hidden, hidden),
        "mlp.c_fc": (hidden, inner),
        "mlp.c_proj": (inner, hidden),
    }
    for name, (inp, out) in shapes.items():
        yield Weight((inp, out), Tokens.source, module=name)
        yield Weight((out,), module=name)
    yield from layer_norm(hidden)
    yield from layer_norm(hidden)


def _stacks(shape: Shape, kernel: Kernel) -> tuple[Stack, ...]:
    """One projection for query, key and value; GELU by its formula keeps five tensors."""
    return (Stack(norm_layer(shape, kernel, readers=(1, 1), inner=5), shape.layers),)


def _outside(shape: Shape, task: str) -> int:
    """The embedding's dropout."""
    return shape.tokens * shape.hidden * shape.mask_bytes if shape.dropout else 0


def _arguments(config: Config) -> dict[str, Any]:
    model = cast(GPT2Model, config.model)
    return {
        "n_embd": model.hidden_size,
        "n_layer": model.num_hidden_layers,
        "n_head": model.num_attention_heads,
        "n_inner": model.intermediate_size,
        "n_positions": model.max_position_embeddings,
        "resid_pdrop": model.dropout,
        "embd_pdrop": model.dropout,
        "attn_pdrop": model.dropout,
    }


def _read(reader: Reader) -> Sizes:
    sizes: Sizes = {key: reader.needed(key) for key in MAIN if key != "intermediate_size"}
    inner = reader.count("n_inner", 4 * sizes["hidden_size"])
    return {
        **sizes,
        "intermediate_size": inner,
        "max_position_embeddings": reader.count("max_position_embeddings", 1024),
        "tie_word_embeddings": reader.flag("tie_word_embeddings", True),
    }


GPT2 = Family(
    name="gpt2",
    tasks=("causal_lm", "sequence_classification"),
    structure=_structure,
    stacks=_stacks,
    outside=_outside,
    widths=(),
    is_decoder=True,
    stores_transposed=True,
    softmax=Softmax.cast_back,
    ia3_targets=("c_attn", "mlp.c_proj"),  # keys and values, and queries in the same layer
    scaled_inputs=("mlp.c_proj",),
    smallest="tiny_gpt2",
    config_class="GPT2Config",
    config_arguments=_arguments,
    checkpoints={"gpt2": _read},
    layer_tensor=r"(?:^|\.)h\.(\d+)\.",
    embedding_tensor="wte.weight",
    inner_tensor="h.0.mlp.c_proj.weight",
)
