"""The tensors of every model family, as transformers' model classes create them.

Each function lists the weights and the attention of one family with the head of `task.option`.
Equality with the real classes is tested for every option of conf/model.
"""

from collections.abc import Callable, Iterator
from typing import cast

from eke.schema import (
    BertModel,
    Config,
    GPT2Model,
    LlamaModel,
    SequenceClassification,
    T5Model,
)
from eke.sizes.structure import Attention, Structure, Tokens, Weight, layer_norm, linear

RELATIVE_BUCKETS = 32
"""Rows of T5's relative position bias: transformers' T5Config.relative_attention_num_buckets."""

VALID_TASKS: dict[str, tuple[str, ...]] = {
    "llama": ("causal_lm", "sequence_classification"),
    "bert": ("masked_lm", "sequence_classification"),
    "gpt2": ("causal_lm", "sequence_classification"),
    "t5": ("seq2seq_lm", "sequence_classification"),
}
"""Family -> the tasks it has a head for, its own pre-training task first."""


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
    width = model.num_attention_heads * head_width(model)
    weights = [
        *_embedding_and_lm_head(config),
        *(w for _ in range(model.num_hidden_layers) for w in _llama_layer(model)),
        Weight((model.hidden_size,)),
    ]
    if is_classification(config):
        weights += linear(num_labels(config), model.hidden_size, Tokens.source, bias=False)
    attention = Attention(model.num_hidden_layers, width, Tokens.source, Tokens.source, causal=True)
    return Structure(tuple(weights), (attention,))


def gpt2(config: Config) -> Structure:
    """GPT2LMHeadModel and GPT2ForSequenceClassification."""
    model = cast(GPT2Model, config.model)
    hidden = model.hidden_size
    weights = [
        *_embedding_and_lm_head(config),
        Weight((model.max_position_embeddings, hidden)),
        *(w for _ in range(model.num_hidden_layers) for w in _gpt2_layer(model)),
        *layer_norm(hidden),
    ]
    if is_classification(config):
        weights += linear(num_labels(config), hidden, Tokens.source, bias=False)
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
        Weight((model.max_position_embeddings, hidden)),
        Weight((model.type_vocab_size, hidden)),
        *layer_norm(hidden),
        *(w for _ in range(model.num_hidden_layers) for w in _bert_layer(model)),
    ]
    if is_classification(config):
        weights += linear(hidden, hidden, Tokens.sample, bias=True)  # the pooler
        weights += linear(num_labels(config), hidden, Tokens.sample, bias=True)
    else:
        weights += linear(hidden, hidden, Tokens.source, bias=True)
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
        Weight((model.vocab_size, hidden), Tokens.none if classify else Tokens.target),
        *(w for _ in range(encoders) for w in _t5_layer(model, Tokens.source)),
        *(w for _ in range(decoders) for w in _t5_layer(model, Tokens.target)),
    ]
    # Relative positions live in the first layer of each stack; a norm ends each stack.
    weights += [Weight((RELATIVE_BUCKETS, heads)), Weight((hidden,))] * 2
    if classify:
        weights += linear(hidden, hidden, Tokens.sample, bias=True)
        weights += linear(num_labels(config), hidden, Tokens.sample, bias=True)
    width = heads * head_width(model)
    attention = (
        Attention(encoders, width, Tokens.source, Tokens.source, causal=False),
        Attention(decoders, width, Tokens.target, Tokens.target, causal=True),
        Attention(decoders, width, Tokens.target, Tokens.source, causal=False),
    )
    return Structure(tuple(weights), attention)


FAMILIES: dict[str, Callable[[Config], Structure]] = {
    "llama": llama,
    "bert": bert,
    "gpt2": gpt2,
    "t5": t5,
}
"""`model.family` -> its structure."""


def _embedding_and_lm_head(config: Config) -> Iterator[Weight]:
    """The input embedding, and the output projection where it is a tensor of its own."""
    model = config.model
    shape = (model.vocab_size, model.hidden_size)
    has_lm_head = not is_classification(config)
    tied = has_lm_head and model.tie_word_embeddings
    yield Weight(shape, Tokens.source if tied else Tokens.none)
    if has_lm_head and not tied:
        yield Weight(shape, Tokens.source)


def _llama_layer(model: LlamaModel) -> Iterator[Weight]:
    hidden, inner, dim = model.hidden_size, model.intermediate_size, head_width(model)
    queries = model.num_attention_heads * dim
    keys = (model.num_key_value_heads or model.num_attention_heads) * dim
    for out, inp in (
        (queries, hidden),
        (keys, hidden),
        (keys, hidden),
        (hidden, queries),
        (inner, hidden),
        (inner, hidden),
        (hidden, inner),
    ):
        yield from linear(out, inp, Tokens.source, bias=False)
    yield Weight((hidden,))
    yield Weight((hidden,))


def _gpt2_layer(model: GPT2Model) -> Iterator[Weight]:
    hidden, inner = model.hidden_size, model.intermediate_size
    # GPT-2's Conv1D stores [in, out]: the order matters to Adafactor's rows and columns.
    for inp, out in ((hidden, 3 * hidden), (hidden, hidden), (hidden, inner), (inner, hidden)):
        yield Weight((inp, out), Tokens.source)
        yield Weight((out,))
    yield from layer_norm(hidden)
    yield from layer_norm(hidden)


def _bert_layer(model: BertModel) -> Iterator[Weight]:
    hidden, inner = model.hidden_size, model.intermediate_size
    for _ in range(4):  # query, key, value, output
        yield from linear(hidden, hidden, Tokens.source, bias=True)
    yield from linear(inner, hidden, Tokens.source, bias=True)
    yield from linear(hidden, inner, Tokens.source, bias=True)
    yield from layer_norm(hidden)
    yield from layer_norm(hidden)


def _t5_layer(model: T5Model, tokens: Tokens) -> Iterator[Weight]:
    """One block of the stack that reads `tokens`; the decoder's has cross-attention."""
    hidden, inner = model.hidden_size, model.intermediate_size
    yield from _t5_attention(model, queries=tokens, keys=tokens)
    if tokens is Tokens.target:
        yield from _t5_attention(model, queries=tokens, keys=Tokens.source)
    for _ in range(2 if model.gated else 1):
        yield from linear(inner, hidden, tokens, bias=False)
    yield from linear(hidden, inner, tokens, bias=False)
    yield Weight((hidden,))


def _t5_attention(model: T5Model, queries: Tokens, keys: Tokens) -> Iterator[Weight]:
    hidden, width = model.hidden_size, model.num_attention_heads * head_width(model)
    for tokens in (queries, keys, keys):
        yield from linear(width, hidden, tokens, bias=False)
    yield from linear(hidden, width, queries, bias=False)
    yield Weight((hidden,))
