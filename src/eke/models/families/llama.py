"""Llama, Qwen2, Qwen3 and Mixtral: decoders with RMSNorm, rotary positions and gated layers."""

from dataclasses import replace
from functools import partial
from typing import Any, cast

from eke.config.schema import Config, LlamaModel, MixtralModel, PretrainedModel
from eke.models.families.family_record import (
    FLOAT32_BYTES,
    MAIN,
    AttentionLayers,
    Family,
    Kernel,
    Layer,
    Reader,
    Shape,
    Stack,
    Structure,
    Tokens,
    Weight,
    embedding_and_lm_head,
    head,
    head_width,
    kept_by_attention,
    layers,
    norm,
    table,
    working_bytes,
)


def _decoder(
    config: Config, *, has_biases: bool = False, norms_heads: bool = False, is_moe: bool = False
) -> Structure:
    """Return the structure of equal layers with two RMSNorms each, and a head."""
    model = cast(LlamaModel, config.model)
    hidden, inner, dim = model.hidden_size, model.intermediate_size, head_width(model)
    queries = model.num_attention_heads * dim
    keys = (model.num_key_value_heads or model.num_attention_heads) * dim
    widths = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
    shapes = {name: (width, hidden) for name, width in widths.items()}
    shapes["self_attn.o_proj"] = (hidden, queries)
    layer = [Weight(shape, Tokens.source, module=name) for name, shape in shapes.items()]
    if has_biases:  # Qwen2
        layer += [Weight((width,), module=name) for name, width in widths.items()]
    if norms_heads:  # Qwen3
        layer += [norm(dim, f"self_attn.{name}") for name in ("q_norm", "k_norm")]
    if is_moe:  # Mixtral
        layer += _experts(cast(MixtralModel, config.model))
    else:
        sides = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden)}
        sides["down_proj"] = (hidden, inner)
        layer += [Weight(s, Tokens.source, module=f"mlp.{name}") for name, s in sides.items()]
    layer += [norm(hidden, name) for name in ("input_layernorm", "post_attention_layernorm")]
    first, last = embedding_and_lm_head(config, "model.embed_tokens", "lm_head")
    weights = [*first, *layers("model.layers", model.num_hidden_layers, layer)]
    weights += [norm(hidden, "model.norm"), *last]
    if labels := config.targets.num_labels:
        weights += head(labels, hidden, Tokens.source, "score", bias=False, is_head=True)
    attention = AttentionLayers(model.num_hidden_layers, queries, causal=True)
    return Structure(tuple(weights), (attention,))


def _experts(model: MixtralModel) -> list[Weight]:
    """Return the router and the experts of a layer, which transformers 5 stacks."""
    hidden, inner, count = model.hidden_size, model.intermediate_size, model.num_local_experts
    stacked = partial(Weight, tokens=Tokens.source, active=(model.num_experts_per_tok, count))
    return [
        Weight((count, hidden), Tokens.source, names=("mlp.gate.weight",)),
        stacked((count, 2 * inner, hidden), module="mlp.experts.gate_up_proj"),
        stacked((count, hidden, inner), module="mlp.experts.down_proj"),
    ]


def _structure_by_count(config: Config) -> Structure:
    """Return the structure of a checkpoint without closed form, from its number of parameters.

    All parameters are assumed to be in matrices with the hidden size as width: Adafactor's state
    is then a lower bound, and other optimizers' states are exact. Each parameter outside an untied
    embedding multiplies every token. FLOPs of attention are omitted if its sizes are unknown.
    """
    model = cast(PretrainedModel, config.model)
    count = model.num_parameters or 0
    embedding = model.vocab_size * model.hidden_size
    counted = config.targets.per_token and model.tie_word_embeddings
    frozen = model.num_frozen_parameters or 0
    looked_up = 0 if counted else min(embedding, count - frozen)
    rows, rest = divmod(count - looked_up - frozen, model.hidden_size)
    weights = [Weight((rows, model.hidden_size), Tokens.source)] if rows else []
    weights += [Weight((rest,))] if rest else []
    weights += [Weight((frozen,), trained=False)] if frozen else []
    if looked_up:
        rows, rest = divmod(looked_up, model.hidden_size)
        weights += [table(rows, model.hidden_size), *([Weight((rest,))] if rest else [])]
    if not model.num_attention_heads or not model.num_hidden_layers:
        return Structure(tuple(weights), ())
    width = model.num_attention_heads * head_width(model)
    attention = AttentionLayers(model.num_hidden_layers, width, causal=config.targets.is_causal)
    return Structure(tuple(weights), (attention,))


def _stacks(shape: Shape, kernel: Kernel) -> tuple[Stack, ...]:
    """Return activations: RMSNorm in float32, rotary positions, gated feed-forward or experts."""
    tokens, hidden = shape.tokens, shape.hidden
    readers = (3, 1 if shape.experts else 2)
    # Each RMSNorm saves its input in float32, the normalized input and 1 / root.
    per_norm = hidden * (FLOAT32_BYTES + shape.weights) + FLOAT32_BYTES
    stream = tokens * (2 * per_norm + hidden * sum(shape.read(n) for n in readers))
    attention = kept_by_attention(shape, kernel, shape.source, shape.source)
    if shape.architecture.norms_heads:
        width = shape.queries + shape.keys
        formats = FLOAT32_BYTES + shape.compute
        attention += tokens * (width * formats + 2 * shape.heads * FLOAT32_BYTES)
    inner = 4 * shape.inner * shape.compute
    linear = 2 * shape.inner * shape.compute
    if shape.experts:
        inner = shape.chosen * (2 * hidden + 4 * shape.inner) * shape.compute
        linear = shape.chosen * (hidden + 2 * shape.inner) * shape.compute
        inner += shape.chosen * 44 + shape.experts * FLOAT32_BYTES  # routing tables
    operands = 2 * (shape.queries + shape.keys) + 2 * hidden
    gates = 2 * shape.inner if not shape.experts else shape.chosen * 2 * shape.inner
    layer = Layer(
        stream=stream,
        attention=attention,
        feed_forward=tokens * inner,
        dropout=0,
        needed=tokens * (operands + gates) * shape.compute,
        dear=tokens * ((2 * shape.queries + 2 * shape.keys + 2 * hidden) * shape.compute + linear),
        working=working_bytes(shape, shape.source, kernel, tokens * inner)
        * (2 if shape.experts else 1),
    )
    return (Stack(layer, shape.layers),)


def _arguments(config: Config) -> dict[str, Any]:
    """Return the arguments of the configuration class. Dropout is only inside attention."""
    model = cast(LlamaModel, config.model)
    return {
        **{key: getattr(model, key) for key in (*MAIN, "max_position_embeddings", "rms_norm_eps")},
        # Qwen3 and Mixtral have other defaults, so null is replaced here.
        "num_key_value_heads": model.num_key_value_heads or model.num_attention_heads,
        "head_dim": head_width(model),
        "rope_parameters": _rope(model),
        "attention_dropout": model.dropout,
    }


def _mixtral_arguments(config: Config) -> dict[str, Any]:
    """Return the arguments of MixtralConfig, without router logits, whose loss is not trained."""
    model = cast(MixtralModel, config.model)
    return {
        **_arguments(config),
        "num_local_experts": model.num_local_experts,
        "num_experts_per_tok": model.num_experts_per_tok,
        "output_router_logits": False,
    }


def _rope(model: LlamaModel) -> dict[str, Any]:
    if model.rope_scaling_factor is None:
        return {"rope_type": "default", "rope_theta": model.rope_theta}
    # Constants of config.json in meta-llama/Llama-3.2-1B, for transformers' modeling_rope_utils.
    return {
        "rope_type": "llama3",
        "rope_theta": model.rope_theta,
        "factor": model.rope_scaling_factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


_read = partial(Reader.main, head_dim=None, tie_word_embeddings=False)
_read_moe = partial(_read, num_local_experts=8, num_experts_per_tok=2)

LLAMA = Family(
    name="llama",
    tasks=("causal_lm", "sequence_classification"),
    structure=_decoder,
    stacks=_stacks,
    # Rotary positions.
    outside=lambda shape, task: 2 * shape.source * (shape.queries // shape.heads) * FLOAT32_BYTES,
    is_decoder=True,
    is_gated=True,
    has_biases=False,
    has_liger=True,
    probable_dropout=0.0,
    ia3_targets=("k_proj", "v_proj", "down_proj"),
    scaled_inputs=("down_proj",),
    smallest="tiny",
    config_class="LlamaConfig",
    config_arguments=_arguments,
    checkpoints={
        "llama": partial(_read, num_key_value_heads=None, max_position_embeddings=2048),
        "mistral": partial(_read, num_key_value_heads=8, max_position_embeddings=131072),
    },
    layer_tensor=r"(?:^|\.)layers\.(\d+)\.",
    inner_tensor="layers.0.mlp.up_proj.weight",
)

QWEN2 = replace(
    LLAMA,
    name="qwen2",
    structure=partial(_decoder, has_biases=True),
    counted_as="llama",
    has_biases=True,
    smallest="",
    config_class="",
    config_arguments=None,
    checkpoints={"qwen2": partial(_read, num_key_value_heads=32, max_position_embeddings=32768)},
)

QWEN3 = replace(
    LLAMA,
    name="qwen3",
    structure=partial(_decoder, norms_heads=True),
    norms_heads=True,
    smallest="tiny_qwen3",
    config_class="Qwen3Config",
    checkpoints={
        "qwen3": partial(_read, num_key_value_heads=32, head_dim=128, max_position_embeddings=32768)
    },
)

MIXTRAL = replace(
    LLAMA,
    name="mixtral",
    structure=partial(_decoder, is_moe=True),
    is_moe=True,
    ia3_targets=("k_proj", "v_proj"),  # the feed-forward is not a linear layer
    scaled_inputs=(),
    smallest="tiny_moe",
    config_class="MixtralConfig",
    config_arguments=_mixtral_arguments,
    checkpoints={
        "mixtral": partial(_read_moe, num_key_value_heads=8, max_position_embeddings=131072)
    },
    inner_tensor="",
)

OTHER = Family(
    name="other",
    tasks=("causal_lm", "masked_lm", "seq2seq_lm", "sequence_classification"),
    structure=_structure_by_count,
    stacks=_stacks,
    outside=lambda shape, task: 0,
    counted_as="llama",
    is_known=False,
    is_gated=True,
)
"""Checkpoints of all other architectures, with the activations of a Llama of the same sizes."""
