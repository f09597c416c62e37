"""Schemas of the models: one per family, sizes under transformers' names."""

from dataclasses import dataclass, field

from eke.schema.limits import at_least, below, between

MAX_LAYERS = 10_000
"""Ten times the deepest published Transformer (Wang et al. 2022, arXiv:2203.00555); sizes are
summed layer by layer."""


@dataclass
class Model:
    """What every family has. Weights are random; no network is needed."""

    option: str = "tiny"
    """The option chosen; set by the option's file."""
    family: str = "llama"
    """Model class: llama, bert, gpt2 or t5; set by the option's file."""
    hidden_size: int = field(default=128, metadata=at_least(1))
    """Width of the residual stream."""
    num_hidden_layers: int = field(default=4, metadata=between(1, MAX_LAYERS))
    """Transformer blocks (of the encoder, in T5)."""
    num_attention_heads: int = field(default=4, metadata=at_least(1))
    """Query heads."""
    intermediate_size: int = field(default=512, metadata=at_least(1))
    """Width of the feed-forward layer."""
    vocab_size: int = field(default=320, metadata=at_least(1))
    """Rows of the embedding; at least the tokenizer's size."""
    dropout: float = field(default=0.0, metadata=below(0, 1))
    """Every dropout of the family (llama has only the one inside attention)."""
    tie_word_embeddings: bool = True
    """Share the input embedding with the output projection."""


@dataclass
class LlamaModel(Model):
    """Llama-style decoder: RMSNorm, rotary positions, gated feed-forward, grouped queries."""

    num_key_value_heads: int | None = field(default=None, metadata=at_least(1))
    """Key and value heads; null is as many as query heads."""
    head_dim: int | None = field(default=None, metadata=at_least(1))
    """Width of one head; null is hidden_size / num_attention_heads."""
    max_position_embeddings: int = field(default=2048, metadata=at_least(1))
    """Longest sequence."""
    rope_theta: float = field(default=10000.0, metadata=at_least(1))
    """Base of the rotary frequencies."""
    rms_norm_eps: float = field(default=1e-5, metadata=at_least(0))
    """Added to the variance."""


@dataclass
class BertModel(Model):
    """BERT encoder: learned positions, post-norm, bidirectional."""

    max_position_embeddings: int = field(default=512, metadata=at_least(1))
    """Longest sequence: rows of the position embedding."""
    type_vocab_size: int = field(default=2, metadata=at_least(1))
    """Segment types."""


@dataclass
class GPT2Model(Model):
    """GPT-2 decoder: learned positions, pre-norm."""

    max_position_embeddings: int = field(default=1024, metadata=at_least(1))
    """Longest sequence: rows of the position embedding."""


@dataclass
class T5Model(Model):
    """T5 encoder-decoder: relative positions, no biases."""

    head_dim: int | None = field(default=None, metadata=at_least(1))
    """Width of one head (transformers' d_kv); null is hidden_size / num_attention_heads."""
    num_decoder_layers: int | None = field(default=None, metadata=between(1, MAX_LAYERS))
    """Decoder blocks; null is as many as encoder blocks."""
    gated: bool = False
    """Gated feed-forward (T5 v1.1) instead of ReLU."""
