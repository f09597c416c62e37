"""Adapters of parameter-efficient fine-tuning: the tensors added, frozen and quantized.

Equality with the modules and tensors of the peft library is tested for every family.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

from eke.config.schema import Adapters, Config, Lora, QLora, TrainedBias
from eke.models.families.family_record import Structure, Tokens, Weight
from eke.models.families.registry import family_of


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
        wanted = family_of(config).ia3_targets if is_ia3(config) else sorted(paths)
    found = {name: _named(name, paths) for name in wanted}
    modules = _union(found.values())
    feed_forward = _union(_named(name, paths) for name in family_of(config).scaled_inputs)
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
    if family_of(config).stores_transposed:
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
    family = family_of(config)
    if not family.is_known:  # no names are known: all that is multiplied, a lower bound
        return weight.tokens is not Tokens.none
    whole = family.float32_layers
    return len(weight.shape) > 1 and bool(weight.module) and _last(weight.module) not in whole


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _trains_bias(config: Config) -> bool:
    return isinstance(config.peft, Lora) and config.peft.bias is TrainedBias.lora_only
