"""Record of a model family, and types of its closed forms: tensors, layers, shapes.

Activation formulas follow the method of Korthikanti et al. 2022, arXiv:2205.05198, section 4.1
(34 s b h for a GPT layer in half precision with dropout). Tensors are taken from modelling_*.py of
transformers 5.23. Sums agree with saved-tensor hooks on a CPU (tests/unit/estimate/memory). A cast
saves no tensor, a matrix multiplication its operands, and a product both factors if both need
gradients. Under autocast each linear layer casts its input.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from math import prod
from typing import Any, Literal

from eke.config.schema import Config, LlamaModel, PretrainedModel, T5Model
from eke.config.schema.fields import LARGEST
from eke.config.schema.model import MAX_LAYERS

FLOAT32_BYTES = 4

INDEX_BYTES = 8
"""Bytes of a token id or a label."""


class Tokens(Enum):
    """Positions of a sample that a weight is multiplied with."""

    none = "none"
    """No matrix multiplication: embeddings without output projection, norms, biases."""
    source = "source"
    """Every token of the input (in T5 of the encoder)."""
    target = "target"
    """Every token of T5's decoder."""
    predicted = "predicted"
    """Positions with a label, if the output projection skips the others."""
    sample = "sample"
    """One vector per sample: heads after pooling."""


class Role(Enum):
    """Kind of a parameter, for optimizers that treat kinds differently."""

    hidden = "hidden"
    embedding = "embedding"
    """Table of vectors, including tied output projections."""
    outer = "outer"
    """Any other tensor of two or more dimensions: heads, poolers, stacked experts."""
    vector = "vector"
    """Biases, normalization weights and IA3's scales, which have one row or one column."""


@dataclass(frozen=True)
class Weight:
    """One parameter tensor."""

    shape: tuple[int, ...]
    """[out, in] for a linear layer, as in torch."""
    tokens: Tokens = Tokens.none
    """Tokens that the weight is multiplied with, for a tied embedding by the output projection."""
    trained: bool = True
    """True if the tensor has a gradient: False if frozen or without effect on the output."""
    names: tuple[str, ...] = ()
    """Names in transformers' class with the head, several for a shared tensor, () if unknown."""
    backward: bool = True
    """True if a gradient passes: False if neither the weight nor any weight before is trained."""
    active: tuple[int, int] = (1, 1)
    """Active experts per token, and all experts."""
    place: Role = Role.hidden
    """Role in the model if the shape does not determine it."""
    module: str = ""
    """Name of the linear layer inside the Transformer layer, for its weight and bias."""
    is_head: bool = False
    """True if the weight belongs to the head of a classification task."""
    is_adapter: bool = False
    is_scale: bool = False
    """True if the weight is a scale of IA3, which has two dimensions."""
    four_bits: bool = False
    """True if the weight is stored as 4-bit numbers with a scale per block."""

    @cached_property
    def role(self) -> Role:
        """Role for optimizers, equal to the role determined from a built module."""
        if len(self.shape) < 2 or self.is_scale:
            return Role.vector
        return Role.outer if len(self.shape) > 2 and self.place is Role.hidden else self.place

    @cached_property
    def num_active(self) -> int:
        """Numbers of the weight that one token is multiplied with."""
        chosen, of = self.active
        return prod(self.shape) * chosen // of


@dataclass(frozen=True)
class AttentionLayers:
    """Attention of one stack of layers."""

    num_layers: int
    width: int
    """Query heads x width of a head, in most models the hidden size."""
    queries: Tokens = Tokens.source
    keys: Tokens = Tokens.source
    causal: bool = field(kw_only=True)
    idle: int = 0
    """Number of first layers without gradient."""


@dataclass(frozen=True)
class Structure:
    """Tensors and attention of a model with its task head."""

    weights: tuple[Weight, ...]
    """Every trainable tensor once, in order of computation."""
    attention: tuple[AttentionLayers, ...]


def table(rows: int, width: int, *names: str, tokens: Tokens = Tokens.none) -> Weight:
    """Return an embedding; `tokens` if it is also the output projection."""
    full = tuple(f"{name}.weight" for name in names)
    return Weight((rows, width), tokens, place=Role.embedding, names=full)


def head(
    out: int, inp: int, tokens: Tokens, name: str, *, bias: bool, is_head: bool = False
) -> Iterator[Weight]:
    """Yield a linear layer after the last Transformer layer."""
    names = (f"{name}.weight",)
    yield Weight((out, inp), tokens, place=Role.outer, is_head=is_head, names=names)
    if bias:
        yield Weight((out,), is_head=is_head, names=(f"{name}.bias",))


def norm(width: int, name: str) -> Weight:
    """Return the weight of an RMSNorm."""
    return Weight((width,), names=(f"{name}.weight",))


def layer_norm(width: int, name: str) -> Iterator[Weight]:
    """Yield scale and shift of a LayerNorm."""
    yield norm(width, name)
    yield Weight((width,), names=(f"{name}.bias",))


def layers(stack: str, count: int, each: Iterable[Weight]) -> Iterator[Weight]:
    """Yield the tensors of a stack of equal layers, from the tensors of one layer."""
    ends = {1: ".bias", 2: ".weight", 3: ""}  # by dimensions; 3: stacked experts
    named = [(w, w.names[0] if w.names else w.module + ends[len(w.shape)]) for w in each]
    for number in range(count):
        for weight, name in named:
            yield replace(weight, names=(f"{stack}.{number}.{name}",))


Kernel = Literal["fused", "math", "eager"]
"""Attention without stored scores, PyTorch's math path (float32), or the model's own code."""


class Softmax(Enum):
    """Number format of the probabilities in eager attention."""

    float32 = "float32"
    """Computed in float32 and cast back after the dropout."""
    autocast = "autocast"
    """torch's default: float32 only if autocast widens it."""
    cast_back = "cast_back"
    """As `autocast`, but cast back before the dropout."""


@dataclass(frozen=True)
class Layer:
    """Bytes that one layer saves for the backward pass, per micro-batch."""

    stream: int
    """Residual stream, norms and inputs of linear layers."""
    attention: int
    """Queries, keys, values, results and extra tensors saved by the kernel."""
    feed_forward: int
    dropout: int
    """Dropout masks outside of attention."""
    needed: int
    """Lower bound without recomputation: operands of matrix multiplications, once each."""
    dear: int
    """Results of linear layers and fused attention, which selective checkpointing keeps."""
    working: int
    """Gradients of activations allocated together in the layer's backward pass."""

    @property
    def kept(self) -> int:
        """All bytes saved for the backward pass."""
        return self.stream + self.attention + self.feed_forward + self.dropout


@dataclass(frozen=True)
class Stack:
    """Equal layers and their number."""

    layer: Layer
    count: int


Sizes = dict[str, Any]
"""Fields of `PretrainedModel` read from a checkpoint's config.json."""

SYNONYMS: dict[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "d_model", "n_embd", "dim"),
    "num_hidden_layers": ("num_hidden_layers", "num_layers", "n_layer", "n_layers"),
    "num_attention_heads": ("num_attention_heads", "num_heads", "n_head", "n_heads"),
    "intermediate_size": ("intermediate_size", "d_ff", "n_inner", "ffn_dim", "hidden_dim"),
    "vocab_size": ("vocab_size",),
    "max_position_embeddings": (
        "max_position_embeddings",
        "n_positions",
        "max_seq_len",
        "max_encoder_position_embeddings",  # LED
    ),
}
"""Key in eke -> names in transformers' configurations, the most common first."""


MAIN = tuple(SYNONYMS)[:5]
"""Keys that every known family requires."""


class InvalidSize(ValueError):
    """A value of config.json is missing or invalid. The message is a clause about that file."""


class Reader:
    """Values of one config.json, checked when read; InvalidSize if one is invalid."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw

    def count(self, key: str, default: int | None = None) -> int | None:
        """Return the positive whole number under any name of the key, else the default."""
        for name in SYNONYMS.get(key, (key,)):
            value = self.raw.get(name)
            if value is None:
                continue
            found = f"in its config.json {name} is {value!r}"
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidSize(f"{found}, not a positive whole number")
            limit = MAX_LAYERS if key in ("num_hidden_layers", "num_decoder_layers") else LARGEST
            if value > limit:
                raise InvalidSize(f"{found}, above the limit of {limit}")
            return value
        return default

    def needed(self, key: str) -> int:
        """Return a required number; InvalidSize if it is missing."""
        found = self.count(key)
        if found is None:
            names = " or ".join(SYNONYMS.get(key, (key,)))
            raise InvalidSize(f"its config.json has no {names}, which plans need")
        return found

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean, or the default if it is missing."""
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise InvalidSize(f"in its config.json {key} is {value!r}, not true or false")
        return value

    def main(self, **defaults: int | bool | None) -> Sizes:
        """Return the five sizes of every architecture, and other sizes with their defaults."""
        sizes: Sizes = {key: self.needed(key) for key in MAIN if key not in defaults}
        for key, value in defaults.items():
            read: Callable[..., Any] = self.flag if isinstance(value, bool) else self.count
            sizes[key] = read(key, value)
        return sizes


@dataclass(frozen=True)
class Shape:
    """Lengths, widths and number formats of a forward pass on one device."""

    architecture: "Family"
    layers: int
    decoder_layers: int
    rows: int
    """Sequences per micro-batch."""
    source: int
    """Largest tokens per sequence."""
    target: int
    """Tokens per decoder sequence in an encoder-decoder, else as `source`."""
    hidden: int
    inner: int
    """Width of the feed-forward layer."""
    heads: int
    queries: int
    """Query heads x width of a head."""
    keys: int
    """Key-value heads x width of a head."""
    repeated: int
    """`keys` after repetition for attention kernels that cannot share key-value heads."""
    vocabulary: int
    predicted: float
    """Fraction of `target` that is projected onto the vocabulary."""
    experts: int
    chosen: int
    """Active experts per token."""
    gated: bool
    """True if the feed-forward layer has three matrices instead of two."""
    dropout: float
    weights: int
    """Bytes per number of weights and of the residual stream."""
    compute: int
    """Bytes per number of operands of matrix multiplications."""
    on_cpu: bool
    masked: bool
    """True if attention receives a mask: rows are padded or packed."""

    @property
    def cast(self) -> bool:
        """True if autocast narrows operands."""
        return self.compute < self.weights

    @property
    def tokens(self) -> int:
        """Tokens per micro-batch including padding."""
        return self.rows * self.source

    @property
    def mask_bytes(self) -> int:
        """Bytes per number of a dropout mask. CPUs store it in the format of the activations."""
        return self.compute if self.on_cpu else 1

    @property
    def dropped(self) -> int:
        """Bytes of one dropout mask of the residual stream."""
        return self.tokens * self.hidden * self.mask_bytes if self.dropout else 0

    def read(self, readers: int) -> int:
        """Return the bytes per number of the input of `readers` linear layers."""
        return readers * self.compute if self.cast else self.weights


@dataclass(frozen=True, eq=False)
class Family:
    """One architecture. Supported attention kernels are read from transformers' class."""

    name: str
    tasks: tuple[str, ...]
    """Options of `task` with a head, the pre-training task first."""
    structure: Callable[[Config], Structure]
    """Tensors and attention of the model with its task head, for parameters and FLOPs."""
    stacks: Callable[[Shape, Kernel], tuple[Stack, ...]]
    """Bytes of activations by layer."""
    outside: Callable[[Shape, str], int]
    """Bytes of other activations for a `task.option`, without ids, embedding norm and logits."""
    counted_as: str = ""
    """Family whose counts in estimate/time/counted.json apply, "": this family."""
    widths: tuple[str, ...] = ("queries", "keys")
    """Widths other than the hidden size, which are terms in `counted.json`."""
    is_known: bool = True
    """True if there are closed forms for the architecture."""
    is_decoder: bool = False
    """True if tokens attend only to earlier tokens."""
    is_encoder_decoder: bool = False
    is_moe: bool = False
    is_gated: bool = False
    """True if the feed-forward layer is always gated. Otherwise `model.gated` decides."""
    norms_heads: bool = False
    """True if query and key of each head are normalized before the rotation."""
    has_biases: bool = True
    """True if some linear layers inside Transformer layers have biases."""
    has_score_bias: bool = False
    stores_transposed: bool = False
    """True if linear layers are transformers' Conv1D, which stores [in, out]."""
    has_liger: bool = False
    """True if liger-kernel 0.8.5 has kernels for the architecture."""
    softmax: Softmax = Softmax.float32
    probable_dropout: float = 0.1
    """Dropout assumed for checkpoints: transformers' default."""
    ia3_targets: tuple[str, ...] = ()
    """Layers that IA3 scales: arXiv:2205.05638, section 3.3."""
    scaled_inputs: tuple[str, ...] = ()
    """Part of `ia3_targets` with a scaled input: the feed-forward's inner activations."""
    float32_layers: tuple[str, ...] = ()
    """Layers without 4-bit quantization: `_keep_in_fp32_modules` of transformers' class."""
    smallest: str = ""
    """Option of `model` with the smallest size, "" for families with checkpoints only."""
    config_class: str = ""
    """transformers' configuration class, "" for families with checkpoints only."""
    config_arguments: Callable[[Config], dict[str, Any]] | None = None
    """Arguments of `config_class`, without arguments common to all families."""
    checkpoints: Mapping[str, Callable[[Reader], Sizes]] = field(default_factory=dict)
    """`model_type` of config.json -> reader, with the defaults of transformers 5 (tested)."""
    layer_tensor: str = ""
    """Regular expression for the layer number in the name of a checkpoint's tensor."""
    embedding_tensor: str = "embed_tokens.weight"
    """Suffix of the name of the embedding."""
    inner_tensor: str = ""
    """Suffix of the name of a matrix [intermediate_size, hidden_size]."""


def head_width(model: LlamaModel | T5Model | PretrainedModel) -> int:
    """Return the width of an attention head: `head_dim`, else hidden size // heads."""
    return model.head_dim or model.hidden_size // model.num_attention_heads


def embedding_and_lm_head(config: Config, embedding: str, lm_head: str) -> tuple[list[Weight], ...]:
    """Return the input embedding, and the output projection unless it is tied."""
    model = config.model
    rows, width = model.vocab_size, model.hidden_size
    if not config.targets.per_token:
        return [table(rows, width, embedding)], []
    if model.tie_word_embeddings:
        return [table(rows, width, embedding, lm_head, tokens=Tokens.source)], []
    last = head(rows, width, Tokens.source, lm_head, bias=False)
    return [table(rows, width, embedding)], list(last)


def kept_by_attention(
    shape: Shape, kernel: Kernel, source: int, target: int, biased: bool = False
) -> int:
    """Return the bytes saved by an attention of `source` keys and `target` queries.

    `biased`: a learned float32 bias is added to the scores.
    """
    here, there = shape.rows * target, shape.rows * source
    compute, result = shape.compute, here * shape.queries * shape.compute
    if kernel == "fused":
        sums = here * shape.heads * FLOAT32_BYTES  # log-sum-exp per query
        # On a CPU a boolean mask is converted to numbers.
        masks = here * source * compute if shape.masked and shape.on_cpu else 0
        operands = (here * shape.queries + 2 * there * shape.repeated) * compute
        return operands + result + sums + masks
    scores = here * shape.heads * source
    operands = (here + 2 * there) * shape.queries  # keys and values are repeated per query head
    if kernel == "math":
        # Probabilities. With dropout also its mask (1 byte on a GPU) and its result.
        matrices = FLOAT32_BYTES * scores * (3 if shape.dropout else 1)
        if shape.dropout and not shape.on_cpu:
            matrices = scores * (2 * FLOAT32_BYTES + 1)
        return operands * FLOAT32_BYTES + result + matrices
    return operands * compute + result + scores * _eager_scores_bytes(shape, biased)


def _eager_scores_bytes(shape: Shape, biased: bool) -> int:
    """Return the bytes per score: softmax, dropout mask, operand of the product with values."""
    softmax = shape.architecture.softmax
    wide = FLOAT32_BYTES
    if softmax is not Softmax.float32 and not shape.cast:
        wide = shape.compute
    elif softmax is Softmax.autocast and shape.on_cpu and not shape.masked and not biased:
        wide = shape.compute  # CPU autocast keeps a softmax in 16 bits unless a bias is float32
    if not shape.dropout:
        return wide + (shape.compute if shape.compute < wide else 0)
    narrowed = softmax is Softmax.cast_back or not shape.cast  # before the dropout, not after it
    mask = shape.mask_bytes if narrowed or not shape.on_cpu else wide
    return wide + mask + shape.compute


def working_bytes(shape: Shape, length: int, kernel: Kernel, freed: int) -> int:
    """Return the largest gradients allocated together: feed-forward, attention operands or scores.

    `length` is the layer's sequence length, `freed` the bytes freed before the attention's backward
    pass.
    """
    tokens = shape.rows * length
    narrow = 2 * shape.hidden + 3 * shape.queries
    sums = 0
    if kernel == "fused" and not shape.on_cpu:  # see training.trace.operations.flash_backward
        sums = FLOAT32_BYTES * shape.queries
        narrow += 2 * shape.queries if shape.repeated < shape.queries else 0
    wide = max(3 * shape.inner * shape.compute, narrow * shape.compute + sums) * tokens
    scores = 0
    if kernel != "fused":  # gradients of probabilities and scores
        scores = 2 * FLOAT32_BYTES * tokens * shape.heads * max(length, shape.source) - freed
    return max(wide, scores) + tokens * shape.hidden * shape.weights
