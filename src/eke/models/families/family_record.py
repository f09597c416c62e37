"""Record of a model family, and the types of its closed forms: tensors, layers, shapes.

The method of the activation formulas is that of Korthikanti et al. 2022, arXiv:2205.05198, section
4.1 (whose 34 s b h holds for one GPT layer in half precision with dropout). The tensors are read
from each family's modelling_*.py of transformers 5.23, and their sums agree with what saved-tensor
hooks count on a CPU (tests/unit/estimate/memory). An operation that casts keeps nothing; a matrix
multiplication keeps its operands; a product keeps both factors where both need gradients. Under
autocast each linear layer casts its input.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from math import prod
from typing import Any, Literal, cast

from eke.config.schema import Config, LlamaModel, SequenceClassification, T5Model
from eke.config.schema.fields import LARGEST
from eke.config.schema.model import MAX_LAYERS

FLOAT32_BYTES = 4

INDEX_BYTES = 8
"""Of a token's id, and of a label."""


class Tokens(Enum):
    """Which positions of a sample a weight is multiplied with."""

    none = "none"
    """No matrix multiplication: embeddings that are only looked up, norms, biases."""
    source = "source"
    """Every token of the input (the encoder's, in T5)."""
    target = "target"
    """Every token of T5's decoder."""
    predicted = "predicted"
    """Positions with a label, where the projection onto the vocabulary leaves out the others."""
    sample = "sample"
    """One vector per sample: heads that run behind pooling."""


class Role(Enum):
    """What a parameter is to an optimizer that does not treat all of them alike."""

    hidden = "hidden"
    """A matrix inside a Transformer layer."""
    embedding = "embedding"
    """A table of vectors, tied output projections included."""
    outer = "outer"
    """Any other tensor of two or more dimensions: heads, poolers, stacked experts."""
    vector = "vector"
    """Biases, normalisation weights, and what else has one row or one column: IA3's scales."""


@dataclass(frozen=True)
class Weight:
    """One parameter tensor."""

    shape: tuple[int, ...]
    tokens: Tokens = Tokens.none
    """A tied output projection is one weight, multiplied with the tokens it is applied to."""
    trained: bool = True
    """False for a frozen tensor, or one that no output depends on: no gradient, no state."""
    names: tuple[str, ...] = ()
    """In transformers' class with its head, several of a shared tensor; () where unknown."""
    backward: bool = True
    """False where no gradient passes: neither it nor anything before it is trained."""
    active: tuple[int, int] = (1, 1)
    """Of a mixture of experts: how many of how many experts a token passes through."""
    place: Role = Role.hidden
    """Its place in the model, where the shape does not determine it."""
    module: str = ""
    """Of a linear layer inside a Transformer layer, weight or bias: its name from that layer on."""
    is_head: bool = False
    """Of the head that a classification task adds."""
    is_adapter: bool = False
    """Added by parameter-efficient fine-tuning."""
    is_scale: bool = False
    """IA3's: of two dimensions, but a factor of each activation."""
    four_bits: bool = False
    """Kept as 4-bit numbers, a scale to each block of them."""

    @cached_property
    def role(self) -> Role:
        """What it is to an optimizer; the build side reads the same from a module."""
        if len(self.shape) < 2 or self.is_scale:
            return Role.vector
        stacked = len(self.shape) > 2
        return Role.outer if stacked and self.place is Role.hidden else self.place

    @cached_property
    def num_active(self) -> int:
        """Numbers that one token is multiplied with, where it is multiplied at all."""
        chosen, of = self.active
        return prod(self.shape) * chosen // of


@dataclass(frozen=True)
class AttentionLayers:
    """The attention of one stack of layers."""

    num_layers: int
    width: int
    """Query heads x width of one head; the hidden size in most models."""
    queries: Tokens = Tokens.source
    keys: Tokens = Tokens.source
    causal: bool = field(kw_only=True)
    idle: int = 0
    """Of these layers, the first ones that no gradient passes."""


@dataclass(frozen=True)
class Structure:
    """One model with its task head."""

    weights: tuple[Weight, ...]
    """Every trainable tensor, shared ones once; what is computed first comes first."""
    attention: tuple[AttentionLayers, ...]


def linear(out: int, inp: int, tokens: Tokens, *, bias: bool, module: str) -> Iterator[Weight]:
    """A linear layer in a Transformer layer, weight as torch stores it: [out, in]."""
    yield Weight((out, inp), tokens, module=module)
    if bias:
        yield Weight((out,), module=module)


def table(rows: int, width: int, *names: str, tokens: Tokens = Tokens.none) -> Weight:
    """An embedding; it is multiplied with `tokens` where it is the output projection, too."""
    whole = tuple(f"{name}.weight" for name in names)
    return Weight((rows, width), tokens, place=Role.embedding, names=whole)


def head(
    out: int, inp: int, tokens: Tokens, name: str, *, bias: bool, is_head: bool = False
) -> Iterator[Weight]:
    """A linear layer behind the last Transformer layer."""
    names = (f"{name}.weight",)
    yield Weight((out, inp), tokens, place=Role.outer, is_head=is_head, names=names)
    if bias:
        yield Weight((out,), is_head=is_head, names=(f"{name}.bias",))


def norm(width: int, name: str) -> Weight:
    """Of an RMSNorm."""
    return Weight((width,), names=(f"{name}.weight",))


def layer_norm(width: int, name: str) -> Iterator[Weight]:
    """Scale and shift."""
    yield norm(width, name)
    yield Weight((width,), names=(f"{name}.bias",))


_ENDS = {1: ".bias", 2: ".weight", 3: ""}
"""Number of dimensions of what has a module's name -> end of its own; experts are one parameter."""


def layers(stack: str, count: int, each: Iterable[Weight]) -> Iterator[Weight]:
    """The tensors of a stack of equal layers, of which `each` has names from the layer on."""
    named = [(w, w.names[0] if w.names else w.module + _ENDS[len(w.shape)]) for w in each]
    for number in range(count):
        for weight, name in named:
            yield replace(weight, names=(f"{stack}.{number}.{name}",))


Kernel = Literal["fused", "math", "eager"]
"""Attention that never has the scores; PyTorch's plain path, in float32; a model's own."""


class Softmax(Enum):
    """Number format of the probabilities in a model's own (eager) attention."""

    float32 = "float32"
    """Computed in float32 and cast back after the dropout."""
    autocast = "autocast"
    """torch's own: float32 only where autocast widens it."""
    cast_back = "cast_back"
    """As `autocast`, and cast back before the dropout."""


@dataclass(frozen=True)
class Layer:
    """Bytes that one layer keeps for the backward pass, per micro-batch."""

    stream: int
    """Residual stream, norms, and the inputs of linear layers."""
    attention: int
    """Queries, keys, values, results, and the extra tensors that the kernel keeps."""
    scores: int
    """Of these, matrices of queries x keys: unfused attention's."""
    feed_forward: int
    dropout: int
    """Masks outside of attention."""
    needed: int
    """Lower bound without recomputation: operands of the matrix multiplications, once each."""
    dear: int
    """Results of linear layers and fused attention: what selective checkpointing keeps."""
    working: int
    """Gradients of activations alive at once in this layer's backward pass."""

    @property
    def kept(self) -> int:
        """All of it."""
        return self.stream + self.attention + self.feed_forward + self.dropout


@dataclass(frozen=True)
class Stack:
    """Equal layers, and how many of them."""

    layer: Layer
    count: int


Sizes = dict[str, Any]
"""Fields of `PretrainedModel`, as read from a checkpoint's config.json."""

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
"""Key of eke -> its names in transformers' configurations, the usual one first."""

_DEPTHS = ("num_hidden_layers", "num_decoder_layers")

MAIN = tuple(SYNONYMS)[:5]
"""Without these a model of a known family has no size."""


class InvalidSize(ValueError):
    """A value of config.json is missing or invalid; the message is a clause on that file."""


class Reader:
    """Values of one config.json, each checked as it is read: InvalidSize says what is wrong."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw

    def count(self, key: str, default: int | None = None) -> int | None:
        """A positive whole number under any of the key's names; the default where there is none."""
        for name in SYNONYMS.get(key, (key,)):
            value = self.raw.get(name)
            if value is None:
                continue
            told = f"in its config.json {name} is {value!r}"
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidSize(f"{told}, which is no positive whole number")
            if value > (MAX_LAYERS if key in _DEPTHS else LARGEST):
                raise InvalidSize(f"{told}, beyond any model")
            return value
        return default

    def needed(self, key: str) -> int:
        """A number without which nothing can be computed."""
        found = self.count(key)
        if found is None:
            names = " or ".join(SYNONYMS.get(key, (key,)))
            raise InvalidSize(f"its config.json has no {names}, which eke's plans are made from")
        return found

    def flag(self, key: str, default: bool) -> bool:
        """A truth value."""
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise InvalidSize(f"in its config.json {key} is {value!r}, not true or false")
        return value

    def main(self, **defaults: int | bool | None) -> Sizes:
        """The five sizes that every architecture has, and others with their defaults."""
        sizes: Sizes = {key: self.needed(key) for key in MAIN if key not in defaults}
        for key, value in defaults.items():
            read: Callable[..., Any] = self.flag if isinstance(value, bool) else self.count
            sizes[key] = read(key, value)
        return sizes


@dataclass(frozen=True)
class Shape:
    """Lengths, widths and number formats of one forward pass on one device."""

    architecture: "Family"
    layers: int
    decoder_layers: int
    """Of an encoder-decoder; 0 elsewhere."""
    rows: int
    """Sequences of a micro-batch."""
    source: int
    """Tokens of each, at most."""
    target: int
    """Tokens of the decoder's sequences in an encoder-decoder; else as `source`."""
    hidden: int
    inner: int
    """Width of the feed-forward layer."""
    heads: int
    queries: int
    """Query heads x width of one."""
    keys: int
    """Key and value heads x width of one."""
    repeated: int
    """The same as passed to attention: repeated where its kernel cannot share them."""
    vocabulary: int
    predicted: float
    """Share of `target` that is projected onto it."""
    experts: int
    chosen: int
    """Experts that a token passes through."""
    gated: bool
    """The feed-forward layer has three matrices instead of two."""
    dropout: float
    weights: int
    """Bytes of a weight, and of the residual stream."""
    compute: int
    """Bytes of an operand of matrix multiplications."""
    on_cpu: bool
    masked: bool
    """Attention is given a mask: rows are padded or packed."""

    @property
    def cast(self) -> bool:
        """Whether autocast narrows operands."""
        return self.compute < self.weights

    @property
    def tokens(self) -> int:
        """Of a micro-batch, padding included."""
        return self.rows * self.source

    @property
    def mask_bytes(self) -> int:
        """Of one dropped number: CPUs keep the noise in the format of what is dropped."""
        return self.compute if self.on_cpu else 1

    @property
    def dropped(self) -> int:
        """Bytes of the mask of one dropout of the residual stream."""
        return self.tokens * self.hidden * self.mask_bytes if self.dropout else 0

    def read(self, readers: int) -> int:
        """Bytes per number of the input of `readers` linear layers."""
        return readers * self.compute if self.cast else self.weights


@dataclass(frozen=True, eq=False)
class Family:
    """One architecture. Support of attention kernels is not here: transformers' class tells it."""

    name: str
    """Value of `model.family`."""
    tasks: tuple[str, ...]
    """Options of `task` that it has a head for, its pre-training task first."""
    structure: Callable[[Config], Structure]
    """Every tensor and the attention of the model with its task head: parameters and FLOPs."""
    stacks: Callable[[Shape, Kernel], tuple[Stack, ...]]
    """Bytes of activations, layer by layer."""
    outside: Callable[[Shape, str], int]
    """Bytes of activations outside of layers, for a `task.option`; ids, the embedding's norm and
    logits are counted for every family."""
    counted_as: str = ""
    """Family whose counts in estimate/time/counted.json apply; "" is its own name."""
    widths: tuple[str, ...] = ("queries", "keys")
    """Projections with a width other than the hidden size; `counted.json` has terms of these."""
    is_known: bool = True
    """False for the stand-in of architectures without closed forms."""
    is_decoder: bool = False
    """A token sees only earlier tokens of its sequence."""
    is_encoder_decoder: bool = False
    is_moe: bool = False
    is_gated: bool = False
    """The feed-forward layer is gated in every model; else `model.gated` decides."""
    norms_heads: bool = False
    """Normalizes each head's query and key before the rotation."""
    has_biases: bool = True
    """Linear layers inside Transformer layers have biases (of some, at least)."""
    has_score_bias: bool = False
    """Adds a learned bias to attention scores."""
    stores_transposed: bool = False
    """Linear layers are transformers' Conv1D, which stores [in, out] and is no nn.Linear."""
    has_liger: bool = False
    """liger-kernel 0.8.5 has kernels for it."""
    softmax: Softmax = Softmax.float32
    probable_dropout: float = 0.1
    """Dropout assumed for a checkpoint, whose own is not read; transformers' default."""
    ia3_targets: tuple[str, ...] = ()
    """Layers that IA3 scales: arXiv:2205.05638, section 3.3."""
    scaled_inputs: tuple[str, ...] = ()
    """Of these IA3 scales the input, the feed-forward's inner activations."""
    float32_layers: tuple[str, ...] = ()
    """Layers never quantized to 4 bits: `_keep_in_fp32_modules` of transformers' class, whose code
    reads the number format of their weights."""
    smallest: str = ""
    """Option of `model` for its smallest size; "" where only checkpoints have the family."""
    config_class: str = ""
    """transformers' configuration class; "" where only checkpoints have the family."""
    config_arguments: Callable[[Config], dict[str, Any]] | None = None
    """Arguments of that class, without those that all families share."""
    checkpoints: Mapping[str, Callable[[Reader], Sizes]] = field(default_factory=dict)
    """`model_type` of config.json -> its reader. Defaults are those of the configuration classes of
    transformers 5 (tested)."""
    layer_tensor: str = ""
    """Regular expression for the number of a layer in the name of a checkpoint's tensor."""
    embedding_tensor: str = "embed_tokens.weight"
    """End of the name of the embedding."""
    inner_tensor: str = ""
    """End of the name of a matrix [intermediate_size, hidden_size]."""


def is_classification(config: Config) -> bool:
    """Whether the head predicts one label per sample."""
    return config.task.option == "sequence_classification"


def num_labels(config: Config) -> int:
    """Classes of a classification task."""
    return cast(SequenceClassification, config.task).num_labels


def head_width(model: LlamaModel | T5Model) -> int:
    """Width of one attention head: `head_dim`, else hidden size / heads, rounded down."""
    return model.head_dim or model.hidden_size // model.num_attention_heads


def embedding_and_lm_head(config: Config, embedding: str, lm_head: str) -> tuple[list[Weight], ...]:
    """The input embedding; and what comes last: the output projection, unless it is tied."""
    model = config.model
    rows, width = model.vocab_size, model.hidden_size
    if is_classification(config):
        return [table(rows, width, embedding)], []
    if model.tie_word_embeddings:
        return [table(rows, width, embedding, lm_head, tokens=Tokens.source)], []
    last = head(rows, width, Tokens.source, lm_head, bias=False)
    return [table(rows, width, embedding)], list(last)


def kept_by_attention(
    shape: Shape, kernel: Kernel, source: int, target: int, biased: bool = False
) -> tuple[int, int]:
    """Bytes of one attention, of `source` keys and `target` queries, and of these the scores.

    `biased` where a learned float32 bias is added to the scores.
    """
    here, there = shape.rows * target, shape.rows * source
    compute, result = shape.compute, here * shape.queries * shape.compute
    if kernel == "fused":
        sums = here * shape.heads * FLOAT32_BYTES
        masks = 0
        if shape.masked and shape.on_cpu:
            masks = here * source * compute  # a boolean mask becomes one of numbers
        operands = (here * shape.queries + 2 * there * shape.repeated) * compute
        return operands + result + sums + masks, 0
    scores = here * shape.heads * source
    operands = (here + 2 * there) * shape.queries  # keys and values repeated for each query head
    if kernel == "math":
        matrices = FLOAT32_BYTES * scores * (3 if shape.dropout else 1)
        if shape.dropout and not shape.on_cpu:
            matrices = scores * (2 * FLOAT32_BYTES + 1)
        return operands * FLOAT32_BYTES + result + matrices, matrices
    matrices = scores * _eager_scores_bytes(shape, biased)
    return operands * compute + result + matrices, matrices


def _eager_scores_bytes(shape: Shape, biased: bool) -> int:
    """Bytes per score: the softmax, its mask, and the operand of the product with the values."""
    softmax = shape.architecture.softmax
    wide = FLOAT32_BYTES
    if softmax is not Softmax.float32 and not shape.cast:
        wide = shape.compute
    elif softmax is Softmax.autocast and shape.on_cpu and not shape.masked and not biased:
        wide = shape.compute  # CPU autocast leaves a softmax in 16 bits; a float32 bias widens it
    if not shape.dropout:
        return wide + (shape.compute if shape.compute < wide else 0)
    narrowed = softmax is Softmax.cast_back or not shape.cast  # before the dropout, not after it
    mask = shape.mask_bytes if narrowed or not shape.on_cpu else wide
    return wide + mask + shape.compute


def working_bytes(shape: Shape, length: int, kernel: Kernel, freed: int) -> int:
    """Gradients alive at once: of the feed-forward, of attention's operands, or of scores.

    `length` is that of the layer's sequences; `freed` are bytes that the layer has freed when its
    attention's turn comes.
    """
    tokens = shape.rows * length
    narrow = 2 * shape.hidden + 3 * shape.queries
    sums = 0
    if kernel == "fused" and not shape.on_cpu:  # as `training.trace.operations.flash_backward`
        sums = FLOAT32_BYTES * shape.queries
        narrow += 2 * shape.queries if shape.repeated < shape.queries else 0
    wide = max(3 * shape.inner * shape.compute, narrow * shape.compute + sums) * tokens
    scores = 0
    if kernel != "fused":  # of the probabilities and of the scores
        scores = 2 * FLOAT32_BYTES * tokens * shape.heads * max(length, shape.source) - freed
    return max(wide, scores) + tokens * shape.hidden * shape.weights
