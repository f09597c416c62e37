"""What a model is made of, as far as counting goes: its weights, and its attention.

What parameter-efficient fine-tuning adds to a model, and what it freezes of it.

Equality with the modules and tensors of the peft library is tested for every family.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from math import prod
from typing import cast

from eke.config.schema import Adapters, Config, Lora, QLora, TrainedBias


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
    """False for a tensor that no output depends on: it gets no gradient and no optimizer state."""
    active: tuple[int, int] = (1, 1)
    """Of a mixture of experts: how many of how many experts a token passes through."""
    place: Role = Role.hidden
    """Where it is, as far as its shape does not say it."""
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
class Attention:
    """The attention of one stack of layers."""

    num_layers: int
    width: int
    """Query heads x width of one head; the hidden size in most models."""
    queries: Tokens
    keys: Tokens
    causal: bool


@dataclass(frozen=True)
class Structure:
    """One model with its task head."""

    weights: tuple[Weight, ...]
    """Every trainable tensor, shared ones once."""
    attention: tuple[Attention, ...]


def linear(
    out: int,
    inp: int,
    tokens: Tokens,
    *,
    bias: bool,
    place: Role = Role.hidden,
    module: str = "",
    is_head: bool = False,
) -> Iterator[Weight]:
    """A linear layer, weight as torch stores it: [out, in]."""
    yield Weight((out, inp), tokens, place=place, module=module, is_head=is_head)
    if bias:
        yield Weight((out,), module=module, is_head=is_head)


def table(rows: int, width: int, tokens: Tokens = Tokens.none) -> Weight:
    """An embedding; it is multiplied with `tokens` where it is the output projection, too."""
    return Weight((rows, width), tokens, place=Role.embedding)


def head(
    out: int, inp: int, tokens: Tokens, *, bias: bool, is_head: bool = False
) -> Iterator[Weight]:
    """A linear layer behind the last Transformer layer."""
    return linear(out, inp, tokens, bias=bias, place=Role.outer, is_head=is_head)


def layer_norm(width: int) -> Iterator[Weight]:
    """Scale and shift; RMSNorm is a lone `Weight((width,))`."""
    yield Weight((width,))
    yield Weight((width,))


IA3_TARGETS: dict[str, tuple[str, ...]] = {
    "llama": ("k_proj", "v_proj", "down_proj"),
    "qwen2": ("k_proj", "v_proj", "down_proj"),
    "qwen3": ("k_proj", "v_proj", "down_proj"),
    "mixtral": ("k_proj", "v_proj"),  # its feed-forward is no linear layer
    "bert": ("key", "value", "output.dense"),
    "gpt2": ("c_attn", "mlp.c_proj"),  # keys and values, and queries in the same layer
    "t5": ("k", "v", "wo"),
}
"""Family -> the layers that IA3 scales: arXiv:2205.05638, section 3.3."""

FEED_FORWARD = ("down_proj", "output.dense", "mlp.c_proj", "wo")
"""Of these the input is scaled, the feed-forward's inner activations; of the others the output."""

KEPT_WHOLE: dict[str, tuple[str, ...]] = {"t5": ("wo",)}
"""Family -> layers that never become 4-bit: those of `_keep_in_fp32_modules` of transformers'
class, whose code reads the number format of their weights."""


@dataclass(frozen=True)
class Targets:
    """The adapted layers, by their names from the Transformer layer on."""

    modules: frozenset[str]
    feed_forward: frozenset[str]
    """Those of which IA3 scales the input."""
    unmatched: tuple[str, ...]
    """Typed names that name nothing."""


def choose_targets(config: Config, names: Iterable[str]) -> Targets:
    """Which of the linear layers are adapted.

    Args:
        config: whose `peft` is not none.
        names: of all linear layers inside Transformer layers, from that layer on.
    """
    peft, paths = cast(Adapters, config.peft), frozenset(names)
    wanted: Sequence[str] | None = peft.target_modules
    if wanted is None:
        wanted = IA3_TARGETS.get(config.model.family, ()) if is_ia3(config) else sorted(paths)
    found = {name: _named(name, paths) for name in wanted}
    modules = _union(found.values())
    feed_forward = _union(_named(name, paths) for name in FEED_FORWARD)
    unmatched = tuple(name for name in wanted if not found[name])
    return Targets(modules, modules & feed_forward, unmatched)


def is_ia3(config: Config) -> bool:
    """Whether the adapters are scales rather than matrices."""
    return isinstance(config.peft, Adapters) and not isinstance(config.peft, Lora)


def _named(name: str, paths: frozenset[str]) -> frozenset[str]:
    """The layer with this whole name; else those whose names end in it, dot by dot."""
    if name in paths:
        return frozenset({name})
    return frozenset(path for path in paths if path.endswith(f".{name}"))


def _union(sets: Iterable[frozenset[str]]) -> frozenset[str]:
    return frozenset(name for names in sets for name in names)


def linear_layers(structure: Structure) -> tuple[str, ...]:
    """Names of the linear layers in Transformer layers, each once; none where they are unknown."""
    return tuple({w.module: None for w in structure.weights if w.module and len(w.shape) == 2})


def adapt(config: Config, structure: Structure) -> Structure:
    """The model with its adapters: what is added, what is frozen, what is kept in 4 bits."""
    if not isinstance(config.peft, Adapters):
        return structure
    targets = choose_targets(config, linear_layers(structure))
    weights = (part for weight in structure.weights for part in _adapted(config, weight, targets))
    return replace(structure, weights=tuple(weights))


def _adapted(config: Config, weight: Weight, targets: Targets) -> Iterator[Weight]:
    """One tensor of the model, and those that are trained beside or instead of it."""
    if weight.is_head:
        # peft trains a copy and keeps the original.
        yield replace(weight, trained=False, tokens=Tokens.none)
        yield weight
        return
    chosen = weight.module in targets.modules
    if chosen and len(weight.shape) == 1 and _trains_bias(config):
        yield weight
        return
    yield replace(weight, trained=False, four_bits=in_four_bits(config, weight))
    if chosen and len(weight.shape) == 2:
        yield from _added(config, weight, weight.module in targets.feed_forward)


def _added(config: Config, weight: Weight, feed_forward: bool) -> Iterator[Weight]:
    """The adapter of one linear layer."""
    out, inp = weight.shape
    if config.model.family == "gpt2":  # Conv1D stores [in, out]
        out, inp = inp, out
    if not isinstance(config.peft, Lora):
        shape = (1, inp) if feed_forward else (out, 1)
        yield Weight(shape, is_adapter=True, is_scale=True)
        return
    yield Weight((config.peft.r, inp), weight.tokens, is_adapter=True)
    yield Weight((out, config.peft.r), weight.tokens, is_adapter=True)
    if config.peft.option == "dora":
        yield Weight((out,), is_adapter=True)


def in_four_bits(config: Config, weight: Weight) -> bool:
    """Whether a tensor of the model is kept as 4-bit numbers."""
    if not isinstance(config.peft, QLora):
        return False
    if config.model.family == "other":  # no names are known: all that is multiplied, a lower bound
        return weight.tokens is not Tokens.none
    whole = KEPT_WHOLE.get(config.model.family, ())
    return len(weight.shape) > 1 and bool(weight.module) and _last(weight.module) not in whole


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _trains_bias(config: Config) -> bool:
    return isinstance(config.peft, Lora) and config.peft.bias is TrainedBias.lora_only
