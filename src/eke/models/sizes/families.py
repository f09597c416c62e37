"""The tensors of every model family, as transformers' model classes create them.

Each function lists the weights and the attention of one family with the head of `task.option`.
Equality with the real classes is tested for every option of conf/model.
"""

from collections.abc import Callable, Iterator
from typing import cast

from eke.config.schema import (
    BertModel,
    Config,
    GPT2Model,
    LlamaModel,
    MixtralModel,
    PretrainedModel,
    SequenceClassification,
    T5Model,
)
from eke.models.sizes.structure import (
    Attention,
    Structure,
    Tokens,
    Weight,
    head,
    layer_norm,
    linear,
    table,
)

RELATIVE_BUCKETS = 32
"""Rows of T5's relative position bias: transformers' T5Config.relative_attention_num_buckets."""

VALID_TASKS: dict[str, tuple[str, ...]] = {
    "llama": ("causal_lm", "sequence_classification"),
    "qwen2": ("causal_lm", "sequence_classification"),
    "qwen3": ("causal_lm", "sequence_classification"),
    "mixtral": ("causal_lm", "sequence_classification"),
    "bert": ("masked_lm", "sequence_classification"),
    "gpt2": ("causal_lm", "sequence_classification"),
    "t5": ("seq2seq_lm", "sequence_classification"),
    "other": ("causal_lm", "masked_lm", "seq2seq_lm", "sequence_classification"),
}
"""Family -> the tasks it has a head for, its own pre-training task first. `qwen2` and `other` are
of checkpoints only; for `other`, a model without a closed form, transformers knows."""


DECODERS = ("llama", "qwen2", "qwen3", "mixtral", "gpt2")
"""Families whose tokens see only what came before them, in their own sequence."""


def is_classification(config: Config) -> bool:
    """Whether the head predicts one label per sample."""
    return config.task.option == "sequence_classification"


def num_labels(config: Config) -> int:
    """Classes of a classification task."""
    return cast(SequenceClassification, config.task).num_labels


def head_width(model: LlamaModel | T5Model) -> int:
    """Width of one attention head: `head_dim`, else hidden size / heads, rounded down."""
    return model.head_dim or model.hidden_size // model.num_attention_heads


def llama(config: Config) -> Structure:
    """LlamaForCausalLM and LlamaForSequenceClassification."""
    model = cast(LlamaModel, config.model)
    return _decoder(config, _llama_attention(model) + _llama_feed_forward(model))


def qwen2(config: Config) -> Structure:
    """Qwen2ForCausalLM and its classifier: Llama with biases of query, key and value."""
    model = cast(LlamaModel, config.model)
    queries, keys = _query_and_key_widths(model)
    widths = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    biases = [Weight((width,), module=f"self_attn.{name}") for name, width in widths.items()]
    return _decoder(config, _llama_attention(model) + biases + _llama_feed_forward(model))


def qwen3(config: Config) -> Structure:
    """Qwen3ForCausalLM and its classifier: Llama with RMSNorm of each head's query and key."""
    model = cast(LlamaModel, config.model)
    norms = [Weight((head_width(model),))] * 2
    return _decoder(config, _llama_attention(model) + norms + _llama_feed_forward(model))


def mixtral(config: Config) -> Structure:
    """MixtralForCausalLM and its classifier; transformers 5 stacks the experts of a layer."""
    model = cast(MixtralModel, config.model)
    hidden, inner, experts = model.hidden_size, model.intermediate_size, model.num_local_experts
    active = (model.num_experts_per_tok, experts)
    feed_forward = [
        Weight((experts, hidden), Tokens.source),  # the router sees every token
        *(
            Weight(shape, Tokens.source, active=active, module=f"mlp.experts.{name}")
            for name, shape in (
                ("gate_up_proj", (experts, 2 * inner, hidden)),
                ("down_proj", (experts, hidden, inner)),
            )
        ),
    ]
    return _decoder(config, _llama_attention(model) + feed_forward)


def _decoder(config: Config, layer: list[Weight]) -> Structure:
    """A decoder of equal layers, each with two RMSNorms beside `layer`."""
    model = cast(LlamaModel, config.model)
    width = model.num_attention_heads * head_width(model)
    norm = Weight((model.hidden_size,))
    weights = [
        *_embedding_and_lm_head(config),
        *(w for _ in range(model.num_hidden_layers) for w in (*layer, norm, norm)),
        Weight((model.hidden_size,)),
    ]
    if is_classification(config):
        labels = num_labels(config)
        weights += head(labels, model.hidden_size, Tokens.source, bias=False, is_head=True)
    attention = Attention(model.num_hidden_layers, width, Tokens.source, Tokens.source, causal=True)
    return Structure(tuple(weights), (attention,))


def gpt2(config: Config) -> Structure:
    """GPT2LMHeadModel and GPT2ForSequenceClassification."""
    model = cast(GPT2Model, config.model)
    hidden = model.hidden_size
    weights = [
        *_embedding_and_lm_head(config),
        table(model.max_position_embeddings, hidden),
        *(w for _ in range(model.num_hidden_layers) for w in _gpt2_layer(model)),
        *layer_norm(hidden),
    ]
    if is_classification(config):
        weights += head(num_labels(config), hidden, Tokens.source, bias=False, is_head=True)
    attention = Attention(
        model.num_hidden_layers, hidden, Tokens.source, Tokens.source, causal=True
    )
    return Structure(tuple(weights), (attention,))


def bert(config: Config) -> Structure:
    """BertForMaskedLM and BertForSequenceClassification."""
    model = cast(BertModel, config.model)
    hidden = model.hidden_size
    weights = [
        *_embedding_and_lm_head(config),
        table(model.max_position_embeddings, hidden),
        table(model.type_vocab_size, hidden),
        *layer_norm(hidden),
        *(w for _ in range(model.num_hidden_layers) for w in _bert_layer(model)),
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


def t5(config: Config) -> Structure:
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
        *(w for _ in range(encoders) for w in _t5_layer(model, Tokens.source)),
        *(w for _ in range(decoders) for w in _t5_layer(model, Tokens.target)),
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


def other(config: Config) -> Structure:
    """A checkpoint without a closed form here: as many numbers as its tensors hold.

    They are counted as square-ish matrices, of which Adafactor keeps less than of the true ones:
    sums of bytes are lower bounds, and with other optimizers the truth. Every number is multiplied
    with every token but the embedding's, where it is not the output projection, too. FLOPs stay
    unknown where the attention's size is, or where experts may be left out.
    """
    model = cast(PretrainedModel, config.model)
    count = model.num_parameters or 0
    embedding = model.vocab_size * model.hidden_size
    counted = not is_classification(config) and model.tie_word_embeddings
    looked_up = 0 if counted else min(embedding, count)
    rows, rest = divmod(count - looked_up, model.hidden_size)
    weights = [Weight((rows, model.hidden_size), Tokens.source)] if rows else []
    weights += [Weight((rest,))] if rest else []
    if looked_up:
        weights.append(table(looked_up // model.hidden_size, model.hidden_size))
    if not model.num_attention_heads or not model.num_hidden_layers:
        return Structure(tuple(weights), ())
    width = model.num_attention_heads * (
        model.head_dim or model.hidden_size // model.num_attention_heads
    )
    causal = config.task.option == "causal_lm"
    attention = Attention(
        model.num_hidden_layers, width, Tokens.source, Tokens.source, causal=causal
    )
    return Structure(tuple(weights), (attention,))


FAMILIES: dict[str, Callable[[Config], Structure]] = {
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "mixtral": mixtral,
    "bert": bert,
    "gpt2": gpt2,
    "t5": t5,
    "other": other,
}
"""`model.family` -> its structure."""


def _embedding_and_lm_head(config: Config) -> Iterator[Weight]:
    """The input embedding, and the output projection where it is a tensor of its own."""
    model = config.model
    rows, width = model.vocab_size, model.hidden_size
    has_lm_head = not is_classification(config)
    tied = has_lm_head and model.tie_word_embeddings
    yield table(rows, width, Tokens.source if tied else Tokens.none)
    if has_lm_head and not tied:
        yield from head(rows, width, Tokens.source, bias=False)


def _query_and_key_widths(model: LlamaModel) -> tuple[int, int]:
    dim = head_width(model)
    return (
        model.num_attention_heads * dim,
        (model.num_key_value_heads or model.num_attention_heads) * dim,
    )


def _llama_attention(model: LlamaModel) -> list[Weight]:
    """Query, key, value and output projections."""
    hidden = model.hidden_size
    queries, keys = _query_and_key_widths(model)
    shapes = {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
    }
    return [Weight(s, Tokens.source, module=f"self_attn.{name}") for name, s in shapes.items()]


def _llama_feed_forward(model: LlamaModel) -> list[Weight]:
    """Gate, up and down projections."""
    hidden, inner = model.hidden_size, model.intermediate_size
    shapes = {
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }
    return [Weight(s, Tokens.source, module=f"mlp.{name}") for name, s in shapes.items()]


def _gpt2_layer(model: GPT2Model) -> Iterator[Weight]:
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


def _bert_layer(model: BertModel) -> Iterator[Weight]:
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


def _t5_layer(model: T5Model, tokens: Tokens) -> Iterator[Weight]:
    """One block of the stack that reads `tokens`; the decoder's has cross-attention."""
    hidden, inner = model.hidden_size, model.intermediate_size
    yield from _t5_attention(model, "layer.0.SelfAttention", queries=tokens, keys=tokens)
    last = 1
    if tokens is Tokens.target:
        yield from _t5_attention(model, "layer.1.EncDecAttention", tokens, Tokens.source)
        last = 2
    inputs = ("wi_0", "wi_1") if model.gated else ("wi",)
    shapes = {**dict.fromkeys(inputs, (inner, hidden)), "wo": (hidden, inner)}
    for name, (out, inp) in shapes.items():
        module = f"layer.{last}.DenseReluDense.{name}"
        yield from linear(out, inp, tokens, bias=False, module=module)
    yield Weight((hidden,))


def _t5_attention(model: T5Model, name: str, queries: Tokens, keys: Tokens) -> Iterator[Weight]:
    hidden, width = model.hidden_size, model.num_attention_heads * head_width(model)
    for part, tokens in {"q": queries, "k": keys, "v": keys}.items():
        yield from linear(width, hidden, tokens, bias=False, module=f"{name}.{part}")
    yield from linear(hidden, width, queries, bias=False, module=f"{name}.o")
    yield Weight((hidden,))
