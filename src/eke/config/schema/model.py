"""Schemas of the model: sizes under transformers' names, attention, kernels, compilation."""

from dataclasses import dataclass, field
from enum import Enum

from eke.config.schema.fields import Key, OptionGroup, at_least, below, between

MISSING = "???"
"""What OmegaConf takes for a value that must be given: its own `MISSING`, without its import."""

MAX_LAYERS = 10_000
"""Ten times the deepest published Transformer (Wang et al. 2022, arXiv:2203.00555); sizes are
summed layer by layer."""


@dataclass
class Model(OptionGroup):
    """What every family has. Weights are random, but for `PretrainedModel`; no network needed."""

    option: str = "tiny"
    family: str = field(default="llama", metadata=Key.GROUP)
    """Model class: llama, qwen3, mixtral, bert, gpt2 or t5; set by the option's file."""
    hidden_size: int = field(default=128, metadata=Key.GROUP | at_least(1))
    """Width of the residual stream."""
    num_hidden_layers: int = field(default=4, metadata=Key.GROUP | between(1, MAX_LAYERS))
    """Transformer blocks (of the encoder, in T5)."""
    num_attention_heads: int = field(default=4, metadata=Key.GROUP | at_least(1))
    """Query heads."""
    intermediate_size: int = field(default=512, metadata=Key.GROUP | at_least(1))
    """Width of the feed-forward layer."""
    vocab_size: int = field(default=320, metadata=Key.GROUP | at_least(1))
    """Rows of the embedding; at least the tokenizer's size."""
    dropout: float | None = field(default=0.0, metadata=Key.SWITCHED | below(0, 1))
    """Every dropout of the family (llama has only the one inside attention); null is what the
    checkpoint has (model=pretrained only)."""
    tie_word_embeddings: bool = field(default=True, metadata=Key.GROUP)
    """Share the input embedding with the output projection."""
    freeze: list[str] = field(default_factory=list, metadata=Key.BOTH)
    """Modules or weights that are not trained, by whole parts of their names in transformers'
    class: [embeddings,encoder.layer.0-5]. They have the format that is computed in."""


@dataclass
class LlamaModel(Model):
    """Llama-style decoder: RMSNorm, rotary positions, gated feed-forward, grouped queries.

    Qwen3 has the same keys; it also normalises queries and keys, head by head.
    """

    num_key_value_heads: int | None = field(default=None, metadata=Key.GROUP | at_least(1))
    """Key and value heads; null is as many as query heads."""
    head_dim: int | None = field(default=None, metadata=Key.GROUP | at_least(1))
    """Width of one head; null is hidden_size / num_attention_heads."""
    max_position_embeddings: int = field(default=2048, metadata=Key.GROUP | at_least(1))
    """Longest sequence."""
    rope_theta: float = field(default=10000.0, metadata=Key.GROUP | at_least(1))
    """Base of the rotary frequencies."""
    rope_scaling_factor: float | None = field(default=None, metadata=Key.GROUP | at_least(1))
    """Llama 3.1's stretching of the slow rotary frequencies for long contexts (transformers'
    rope_type llama3, original length 8192); null leaves them alone."""
    rms_norm_eps: float = field(default=1e-5, metadata=Key.GROUP | at_least(0))
    """Added to the variance."""


@dataclass
class MixtralModel(LlamaModel):
    """Llama-style decoder whose feed-forward is a mixture of experts."""

    num_local_experts: int = field(default=4, metadata=Key.GROUP | at_least(1))
    """Feed-forward networks per layer."""
    num_experts_per_tok: int = field(default=2, metadata=Key.GROUP | at_least(1))
    """How many of them a token passes through."""


@dataclass
class BertModel(Model):
    """BERT encoder: learned positions, post-norm, bidirectional."""

    max_position_embeddings: int = field(default=512, metadata=Key.GROUP | at_least(1))
    """Longest sequence: rows of the position embedding."""
    type_vocab_size: int = field(default=2, metadata=Key.GROUP | at_least(1))
    """Segment types."""


@dataclass
class GPT2Model(Model):
    """GPT-2 decoder: learned positions, pre-norm."""

    max_position_embeddings: int = field(default=1024, metadata=Key.GROUP | at_least(1))
    """Longest sequence: rows of the position embedding."""


@dataclass
class T5Model(Model):
    """T5 encoder-decoder: relative positions, no biases."""

    head_dim: int | None = field(default=None, metadata=Key.GROUP | at_least(1))
    """Width of one head (transformers' d_kv); null is hidden_size / num_attention_heads."""
    num_decoder_layers: int | None = field(
        default=None, metadata=Key.GROUP | between(1, MAX_LAYERS)
    )
    """Decoder blocks; null is as many as encoder blocks."""
    gated: bool = field(default=False, metadata=Key.GROUP)
    """Gated feed-forward (T5 v1.1) instead of ReLU."""


@dataclass
class PretrainedModel(Model):
    """A checkpoint: a local folder or a name on the Hugging Face hub.

    Only the first three keys and `freeze` are set by users. The others say what was found in the
    checkpoint: eke fills them in before it checks and plans, so that rules, sizes and the run's
    identity see them.
    """

    name_or_path: str = field(default=MISSING, metadata=Key.GROUP)
    """Local folder in the hub's layout, else a name on the hub."""
    revision: str | None = field(default=None, metadata=Key.GROUP)
    """Branch, tag or commit on the hub; null is its main branch."""
    dropout: float | None = field(default=None, metadata=Key.SWITCHED | below(0, 1))
    """Every dropout of the model; null is what the checkpoint has."""
    content: str = field(default="", metadata=Key.GROUP)
    """Filled in: hash of a local folder's config.json and weights, or `name@commit` of the hub."""
    model_type: str = field(default="", metadata=Key.GROUP)
    """Filled in: transformers' name of the architecture."""
    num_parameters: int | None = field(default=None, metadata=Key.GROUP | at_least(0))
    """Filled in for architectures without a closed form: numbers in the checkpoint's tensors."""
    num_frozen_parameters: int | None = field(default=None, metadata=Key.BOTH | at_least(0))
    """Filled in, likewise: of these, numbers in the tensors that `freeze` names."""
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
    """Filled in; null where positions have no table."""
    label_names: list[str] = field(default_factory=list, metadata=Key.GROUP)
    """Filled in for classifiers: names of the classes of the head, by number."""
    supports_sdpa: bool | None = field(default=None, metadata=Key.GROUP)
    """Filled in: the class of the task has PyTorch's attention; null where that is unknown."""
    supports_flash_attn: bool | None = field(default=None, metadata=Key.GROUP)
    """Filled in, likewise."""
    supports_flex_attn: bool | None = field(default=None, metadata=Key.GROUP)
    """Filled in, likewise."""
    router_loss: float | None = field(default=None, metadata=Key.GROUP)
    """Filled in: coefficient of the router loss that config.json asks for."""
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


MODELS: dict[str, type[Model]] = {
    "llama": LlamaModel,
    "mixtral": MixtralModel,
    "bert": BertModel,
    "gpt2": GPT2Model,
    "t5": T5Model,
    "pretrained": PretrainedModel,
}
"""Schema name -> class; the file of an option names one, and families may share it."""


class Backend(Enum):
    """Kernel of PyTorch's scaled dot-product attention."""

    auto = "auto"
    flash = "flash"
    mem_efficient = "mem_efficient"
    cudnn = "cudnn"
    math = "math"


AUTO_ATTENTION = "auto"
"""Option that stands for sdpa, or eager where the model's class has no other."""


@dataclass
class Attention(OptionGroup):
    """Attention implementation."""

    option: str = "sdpa"
    backend: Backend = field(default=Backend.auto, metadata=Key.ROUNDING)
    """The one kernel sdpa may use (mem_efficient is xFormers'); auto leaves it to PyTorch."""


@dataclass
class Kernels(OptionGroup):
    """Fused kernels in place of a model's own operations."""

    fused_linear_cross_entropy: bool = field(default=False, metadata=Key.ROUNDING)
    """Projects onto the vocabulary and takes the loss piece by piece: never all logits at once."""
    sparse_prediction: bool = field(default=False, metadata=Key.ROUNDING)
    """Leaves positions without a label, which add nothing to the loss, out of the projection."""


class CompileMode(Enum):
    """What inductor takes its time for."""

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
    """Of inductor: reduce_overhead replays CUDA graphs; max_autotune does, too, and times several
    kernels for each matrix multiplication."""
    regional: bool = field(default=False, metadata=Key.ROUNDING)
    """Compile one Transformer layer, for all layers alike, instead of the whole model: a fraction
    of the compile time, and nothing is fused across layers."""

    @property
    def replays_graphs(self) -> bool:
        """Whether CUDA graphs are replayed on a GPU."""
        by_mode = self.option == "inductor" and self.mode in GRAPH_MODES
        return self.option == "cudagraphs" or by_mode
