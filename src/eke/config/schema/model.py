"""Schemas of the model, attention, fused kernels and compilation."""

from dataclasses import dataclass, field
from enum import Enum

from eke.config.schema.fields import Key, OptionGroup, at_least, below, between

MAX_LAYERS = 10_000
"""10 times the layers of the deepest published Transformer (arXiv:2203.00555)."""


@dataclass
class Model(OptionGroup):
    """Keys of all model families. Weights are random except for `PretrainedModel`."""

    option: str = "tiny"
    family: str = field(default="llama", metadata=Key.GROUP)
    """Model class, set by the option file. One of llama, qwen3, mixtral, bert, gpt2, t5."""
    hidden_size: int = field(default=128, metadata=Key.GROUP | at_least(1))
    """Width of the residual stream."""
    num_hidden_layers: int = field(default=4, metadata=Key.GROUP | between(1, MAX_LAYERS))
    """Number of Transformer blocks (T5: of encoder blocks)."""
    num_attention_heads: int = field(default=4, metadata=Key.GROUP | at_least(1))
    """Number of query heads."""
    intermediate_size: int = field(default=512, metadata=Key.GROUP | at_least(1))
    """Width of the feed-forward layer."""
    vocab_size: int = field(default=320, metadata=Key.GROUP | at_least(1))
    """Rows of the embedding. At least the size of the tokenizer."""
    dropout: float | None = field(default=0.0, metadata=Key.SWITCHED | below(0, 1))
    """Dropout probability (Llama: only in attention). null: as in the checkpoint (pretrained)."""
    tie_word_embeddings: bool = field(default=True, metadata=Key.GROUP)
    """Share the input embedding with the output projection."""
    freeze: list[str] = field(default_factory=list, metadata=Key.BOTH)
    """Modules and weights that are not trained. Named as in transformers' class, by whole parts:
    [embeddings,encoder.layer.0-5]. Frozen weights use the compute format."""


@dataclass
class LlamaModel(Model):
    """Llama-style decoder: RMSNorm, rotary positions, gated feed-forward, grouped-query attention.

    Qwen3 has the same keys and also normalises the queries and keys of each head.
    """

    num_key_value_heads: int | None = field(default=None, metadata=Key.GROUP | at_least(1))
    """Number of key and value heads. null: num_attention_heads."""
    head_dim: int | None = field(default=None, metadata=Key.GROUP | at_least(1))
    """Width of one head. null: hidden_size / num_attention_heads."""
    max_position_embeddings: int = field(default=2048, metadata=Key.GROUP | at_least(1))
    """Longest sequence in tokens."""
    rope_theta: float = field(default=10000.0, metadata=Key.GROUP | at_least(1))
    """Base of the rotary frequencies."""
    rope_scaling_factor: float | None = field(default=None, metadata=Key.GROUP | at_least(1))
    """Factor of Llama 3's rotary scaling for long contexts. Sets transformers' rope_type llama3
    with original length 8192. null: no scaling."""
    rms_norm_eps: float = field(default=1e-5, metadata=Key.GROUP | at_least(0))
    """Epsilon added to the variance in RMSNorm."""


@dataclass
class MixtralModel(LlamaModel):
    """Llama-style decoder with a mixture of experts as feed-forward."""

    num_local_experts: int = field(default=4, metadata=Key.GROUP | at_least(1))
    """Number of experts per layer."""
    num_experts_per_tok: int = field(default=2, metadata=Key.GROUP | at_least(1))
    """Number of experts that process each token."""


@dataclass
class BertModel(Model):
    """BERT encoder: learned positions, post-norm, bidirectional."""

    max_position_embeddings: int = field(default=512, metadata=Key.GROUP | at_least(1))
    """Longest sequence in tokens (rows of the position embedding)."""
    type_vocab_size: int = field(default=2, metadata=Key.GROUP | at_least(1))
    """Number of segment types."""


@dataclass
class GPT2Model(Model):
    """GPT-2 decoder: learned positions, pre-norm."""

    max_position_embeddings: int = field(default=1024, metadata=Key.GROUP | at_least(1))
    """Longest sequence in tokens (rows of the position embedding)."""


@dataclass
class T5Model(Model):
    """T5 encoder-decoder: relative positions, no biases."""

    head_dim: int | None = field(default=None, metadata=Key.GROUP | at_least(1))
    """Width of one head (transformers' d_kv). null: hidden_size / num_attention_heads."""
    num_decoder_layers: int | None = field(
        default=None, metadata=Key.GROUP | between(1, MAX_LAYERS)
    )
    """Number of decoder blocks. null: as many as encoder blocks."""
    gated: bool = field(default=False, metadata=Key.GROUP)
    """Use the gated feed-forward of T5 v1.1 instead of ReLU."""


@dataclass
class PretrainedModel(Model):
    """Checkpoint in a local folder or on the Hugging Face hub.

    Users set the first three keys and `freeze`. eke reads the other keys from the checkpoint before
    it checks and plans the run, so they are part of the run's identity.
    """

    name_or_path: str = field(default="???", metadata=Key.GROUP)
    """Local folder in the hub's layout, or a name on the hub."""
    revision: str | None = field(default=None, metadata=Key.GROUP)
    """Branch, tag or commit on the hub. null: the main branch."""
    dropout: float | None = field(default=None, metadata=Key.SWITCHED | below(0, 1))
    """Probability of every dropout. null: the checkpoint's value."""
    content: str = field(default="", metadata=Key.GROUP)
    """Filled in: hash of a local folder's config.json and weights, or `name@commit` of the hub."""
    model_type: str = field(default="", metadata=Key.GROUP)
    """Filled in: transformers' name of the architecture."""
    num_parameters: int | None = field(default=None, metadata=Key.GROUP | at_least(0))
    """Filled in for architectures without a formula: number of elements in the checkpoint."""
    num_frozen_parameters: int | None = field(default=None, metadata=Key.BOTH | at_least(0))
    """Filled in, as num_parameters: number of elements in tensors that `freeze` names."""
    hidden_size: int = field(default=0, metadata=Key.GROUP | at_least(0))
    """Filled in."""
    num_hidden_layers: int = field(default=0, metadata=Key.GROUP | at_least(0))
    """Filled in."""
    num_attention_heads: int = field(default=0, metadata=Key.GROUP | at_least(0))
    """Filled in."""
    intermediate_size: int = field(default=0, metadata=Key.GROUP | at_least(0))
    """Filled in."""
    vocab_size: int = field(default=0, metadata=Key.GROUP | at_least(0))
    """Filled in."""
    num_key_value_heads: int | None = field(default=None, metadata=Key.GROUP | at_least(0))
    """Filled in."""
    head_dim: int | None = field(default=None, metadata=Key.GROUP | at_least(0))
    """Filled in."""
    max_position_embeddings: int | None = field(default=None, metadata=Key.GROUP | at_least(0))
    """Filled in. null: positions have no table."""
    label_names: list[str] = field(default_factory=list, metadata=Key.GROUP)
    """Filled in for classifiers: class names of the head, by number."""
    supports_sdpa: bool | None = field(default=None, metadata=Key.GROUP)
    """Filled in: whether transformers' class for the task supports SDPA. null: unknown."""
    supports_flash_attn: bool | None = field(default=None, metadata=Key.GROUP)
    """Filled in: whether transformers' class supports FlashAttention. null: unknown."""
    supports_flex_attn: bool | None = field(default=None, metadata=Key.GROUP)
    """Filled in: whether transformers' class supports FlexAttention. null: unknown."""
    router_loss: float | None = field(default=None, metadata=Key.GROUP)
    """Filled in: coefficient of the router loss in config.json."""
    type_vocab_size: int = field(default=0, metadata=Key.GROUP | at_least(0))
    """Filled in for BERT."""
    num_decoder_layers: int | None = field(default=None, metadata=Key.GROUP | at_least(0))
    """Filled in for T5."""
    gated: bool = field(default=False, metadata=Key.GROUP)
    """Filled in for T5."""
    num_local_experts: int = field(default=0, metadata=Key.GROUP | at_least(0))
    """Filled in for a mixture of experts."""
    num_experts_per_tok: int = field(default=0, metadata=Key.GROUP | at_least(0))
    """Filled in for a mixture of experts."""


class Backend(Enum):
    """Kernel of PyTorch's scaled dot-product attention."""

    auto = "auto"
    flash = "flash"
    mem_efficient = "mem_efficient"
    cudnn = "cudnn"
    math = "math"


AUTO_ATTENTION = "auto"
"""Option that selects sdpa, or eager if the model's class does not support sdpa."""


@dataclass
class Attention(OptionGroup):
    """Attention implementation."""

    option: str = "sdpa"
    backend: Backend = field(default=Backend.auto, metadata=Key.ROUNDING)
    """Kernel of sdpa. auto: PyTorch chooses. mem_efficient comes from xFormers."""


@dataclass
class Kernels(OptionGroup):
    """Fused kernels that replace operations of the model."""

    fused_linear_cross_entropy: bool = field(default=False, metadata=Key.ROUNDING)
    """Fuse the vocabulary projection with the loss, in chunks. Full logits are never stored."""
    sparse_prediction: bool = field(default=False, metadata=Key.ROUNDING)
    """Skip the projection of positions without a label. The loss does not depend on them."""

    @property
    def is_liger(self) -> bool:
        """Whether Liger's modules replace modules of the model."""
        return self.option == "liger"


class CompileMode(Enum):
    """Mode of inductor: trades compile time for speed."""

    default = "default"
    reduce_overhead = "reduce_overhead"
    max_autotune = "max_autotune"
    max_autotune_no_cudagraphs = "max_autotune_no_cudagraphs"


GRAPH_MODES = (CompileMode.reduce_overhead, CompileMode.max_autotune)
"""Modes that replay CUDA graphs on a GPU."""


@dataclass
class Compile(OptionGroup):
    """torch.compile."""

    mode: CompileMode = field(default=CompileMode.default, metadata=Key.ROUNDING)
    """Mode of inductor. reduce_overhead: replay CUDA graphs. max_autotune: also time several
    kernels for each matrix multiplication. max_autotune_no_cudagraphs: time kernels without CUDA
    graphs."""
    regional: bool = field(default=False, metadata=Key.ROUNDING)
    """Compile one Transformer layer for all layers. Compiles faster and fuses less."""

    @property
    def is_inductor(self) -> bool:
        """Whether inductor fuses operations."""
        return self.option == "inductor"

    @property
    def replays_graphs(self) -> bool:
        """True if CUDA graphs are replayed on a GPU."""
        by_mode = self.is_inductor and self.mode in GRAPH_MODES
        return self.option == "cudagraphs" or by_mode
