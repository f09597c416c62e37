"""Size of a model, computed from its configuration without building it.

Model FLOPs of a training step do not depend on the implementation. Each matrix-multiplied parameter
counts 6 per token (2 forward, 4 backward), and the two products of attention 12 L S h per token:
Chowdhery et al. 2022, arXiv:2204.02311, appendix B. Causal attention counts half, because half of
the score matrix is masked: Dao 2023, arXiv:2307.08691, section 4.1. A frozen weight counts 4, since
only its input needs a gradient (Hu et al. 2021, arXiv:2106.09685, section 4.2). Weights and
attention before the first trained layer count a third. Not counted: norms, activations, softmax,
dropout, rotary positions, the loss, the optimizer's arithmetic, inactive experts, positions without
label in sparse prediction, and recomputation.

Added, frozen and quantized tensors of adapters equal peft's (tested for every family).
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import cast

from eke.common.errors import ConfigError, Fix, Problem
from eke.config import schema
from eke.config.schema import Adapters, Config, Lora
from eke.models.families import AttentionLayers, Role, Structure, Tokens, Weight, family_of
from eke.models.freezing import find_problem, is_frozen


@dataclass(frozen=True)
class ModelSize:
    """Counts for one model with one task head."""

    num_parameters: int
    """Parameters without adapters, with shared parameters counted once."""
    num_trained_parameters: int | None
    """Parameters that an optimizer updates, None if only the built model has their number."""
    num_active_parameters: int
    """Parameters without the inactive experts of a token."""
    num_matmul_parameters: int
    """Parameters in matrix products with every token, without heads after pooling."""
    flops_per_sample: float | None
    """Model FLOPs of a training step per sample, forward and backward, None if unknown."""
    flops_formula: str
    tokens_per_sample: float = 0.0
    """Mean tokens of source and target, without padding."""

    @property
    def flops_per_token(self) -> float | None:
        """Model FLOPs of a training step per token; None if unknown."""
        if self.flops_per_sample is None or not self.tokens_per_sample:
            return None
        return self.flops_per_sample / self.tokens_per_sample


def predicted_frac(config: Config, length: float | None = None) -> float:
    """Return the mean fraction of positions with a label (at least one per row), 1 if unknown."""
    share, tokens = config.targets.mask_frac, length or config.data.seq_len
    if not config.kernels.sparse_prediction or not share:
        return 1.0
    return share + (1 - share) ** tokens / tokens


def most_predicted(config: Config, rows: int, length: int) -> int:
    """Return the likely maximum of positions with a label in a micro-batch."""
    positions, share = rows * length, predicted_frac(config, length)
    deviation = math.sqrt(positions * share * (1 - share))
    # Three standard deviations above the mean: one micro-batch in 740 has more.
    return min(positions, math.ceil(positions * share + 3 * deviation))


CHUNK_ROWS, CHUNK_BYTES = 1024, 512 << 20
"""Smallest number of rows per chunk, unless the logits exceed CHUNK_BYTES."""

BLOCK_BYTES = 32 << 20
"""Float32 probabilities allocated at a time without a compiler that fuses operations: a part of the
50 MB cache of an H100."""


def chunk_rows(rows: int, vocabulary: int, logit_bytes: int) -> int:
    """Return the rows that the fused loss projects at a time."""
    most = max(1, CHUNK_BYTES // (vocabulary * logit_bytes))
    # Four chunks of a large batch: each reads and writes the projection's gradient, 8 bytes per
    # number at 3 TB/s. With 2,048 rows that takes a sixth of the time of the products (H100).
    return min(most, max(CHUNK_ROWS, -(-rows // 4)))


def _with_sparse_head(config: Config, structure: Structure) -> Structure:
    """Return a structure in which the output projection has only the predicted positions."""
    if predicted_frac(config) == 1:
        return structure
    rows = config.model.vocab_size

    def sparse(weight: Weight) -> Weight:
        is_projection = weight.tokens is not Tokens.none and weight.shape[0] == rows
        return replace(weight, tokens=Tokens.predicted) if is_projection else weight

    return replace(structure, weights=tuple(map(sparse, structure.weights)))


_PER_PARAMETER = 6
"""Forward multiplication and addition, twice that backward: arXiv:2204.02311, appendix B."""
_PER_FROZEN_PARAMETER = 4
"""FLOPs of a frozen weight, which has no gradient."""
_PER_SCORE = 12
"""Two products of attention, 2 FLOPs each, three times (forward, two gradients): see above."""
PER_IDLE_PARAMETER, PER_IDLE_SCORE = 2, 4
"""FLOPs of weights and scores before the first trained layer: forward only."""


_Counts = dict[Tokens | tuple[Tokens, Tokens], float]
"""Vectors of each kind in one sample, and products of two kinds."""


@dataclass(frozen=True)
class SampleMeans:
    """Mean tokens of training samples, and mean products of tokens for attention."""

    source: float
    target: float
    """Tokens of the decoder. Equal to `source` except in seq2seq_lm, also for T5 classifiers."""
    source_by_source: float
    target_by_target: float
    target_by_source: float


def full_samples(config: Config) -> SampleMeans:
    """Return the means of samples that all have `data.seq_len` tokens."""
    source = config.data.seq_len
    target = config.target_len or source
    return SampleMeans(source, target, source * source, target * target, target * source)


def tokens_per_sample(config: Config, means: SampleMeans | None = None) -> _Counts:
    """Count the vectors of a sample that each kind of weight or attention is multiplied with."""
    known = means or full_samples(config)
    return {
        Tokens.none: 0,
        Tokens.source: known.source,
        Tokens.target: known.target,
        Tokens.predicted: predicted_frac(config, known.target) * known.target,
        Tokens.sample: 1,
        (Tokens.source, Tokens.source): known.source_by_source,
        (Tokens.target, Tokens.target): known.target_by_target,
        (Tokens.target, Tokens.source): known.target_by_source,
    }


def training_flops(
    config: Config, structure: Structure, means: SampleMeans | None = None
) -> tuple[float, str]:
    """Return the model FLOPs of a training step per sample, and their formula."""
    tokens = tokens_per_sample(config, means)
    matmul = sum(_per_parameter(w) * w.num_active * tokens[w.tokens] for w in structure.weights)
    attention = sum(attention_flops(a, tokens) for a in structure.attention)
    return float(matmul) + float(attention), _formula(structure, tokens)


def _per_parameter(weight: Weight) -> int:
    if not weight.backward:
        return PER_IDLE_PARAMETER
    return _PER_PARAMETER if weight.trained else _PER_FROZEN_PARAMETER


def attention_flops(attention: AttentionLayers, tokens: _Counts) -> float:
    """Return the training FLOPs per sample of one stack's attention."""
    scores = tokens[attention.queries, attention.keys] * (0.5 if attention.causal else 1)
    passed = attention.num_layers - attention.idle
    return attention.width * scores * (_PER_SCORE * passed + PER_IDLE_SCORE * attention.idle)


def _formula(structure: Structure, tokens: _Counts) -> str:
    """Format the sum: `6 x 803840 x 256 tokens + 12 x 4 layers x 128 x 256 x 256 / 2`."""
    units = {
        Tokens.source: "tokens",
        Tokens.target: "decoder tokens",
        Tokens.predicted: "predicted tokens",
        Tokens.sample: "per sample",
    }
    parts = []
    for kind, unit in units.items():
        of_kind = [w for w in structure.weights if w.tokens is kind]
        for factor in (_PER_PARAMETER, _PER_FROZEN_PARAMETER, PER_IDLE_PARAMETER):
            counted = [w for w in of_kind if _per_parameter(w) == factor]
            if not counted:
                continue
            active = any(w.num_active != prod(w.shape) for w in counted)
            words = f"{' active' if active else ''}{'' if factor == _PER_PARAMETER else ' frozen'}"
            size = sum(w.num_active for w in counted)
            parts.append(f"{factor} x {size}{words} x {_format_mean(tokens[kind])} {unit}")
    parts += [
        f"{each} x {num} layers x {a.width} x {_scores(a, tokens)}"
        f"{' / 2 (causal)' if a.causal else ''}"
        for a in structure.attention
        for each, num in ((_PER_SCORE, a.num_layers - a.idle), (PER_IDLE_SCORE, a.idle))
        if num
    ]
    return " + ".join(parts)


def _scores(attention: AttentionLayers, tokens: _Counts) -> str:
    queries, keys = tokens[attention.queries], tokens[attention.keys]
    found = tokens[attention.queries, attention.keys]
    if found == queries * keys:
        return f"{_format_mean(queries)} x {_format_mean(keys)}"
    return f"{_format_mean(found)} (mean of tokens x tokens)"


def _format_mean(mean: float) -> str:
    """Format a whole number completely, a mean with four digits or one decimal."""
    if mean == int(mean):
        return str(int(mean))
    return f"{mean:.4g}" if mean < 1000 else f"{mean:.1f}"


_MAX_KEPT = 16
"""Number of cached structures. A sweep or a search uses few models, each thousands of times."""

_kept: dict[str, Structure] = {}


def _once(content: str, make: Callable[[], Structure]) -> Structure:
    found = _kept.pop(content) if content in _kept else make()
    _kept[content] = found  # last is newest
    if len(_kept) > _MAX_KEPT:
        del _kept[next(iter(_kept))]
    return found


def structure(config: Config) -> Structure:
    """Return the structure of the model with its task head; ConfigError if there is no head."""
    family, task, tasks = family_of(config), config.targets.option, family_of(config).tasks
    if task not in tasks:
        why = f"{family.name} models have heads only for {' and '.join(tasks)}"
        fix = Fix(f"task={tasks[0]}")
        raise ConfigError(Problem("task", task, why, fix, "task_needs_other_model"))
    return _once(repr((config.model, config.task)), lambda: family.structure(config))


def training_structure(config: Config) -> Structure:
    """Return the structure with adapters and frozen weights; errors of `structure` and `freeze`."""
    content = repr((config.model, config.task, config.peft, config.kernels.sparse_prediction))
    return _once(content, lambda: _with_sparse_head(config, _adapt(config, structure(config))))


def passed_layers(config: Config, counts: Sequence[int]) -> list[int]:
    """Count the layers of each stack that a gradient passes through."""
    idle = [part.idle for part in training_structure(config).attention]
    return [n - (idle[stack] if idle else 0) for stack, n in enumerate(counts)]


def model_size(config: Config, means: SampleMeans | None = None) -> ModelSize:
    """Return parameters and training FLOPs. Without `means` samples have `data.seq_len` tokens."""
    parts, trained = structure(config), training_structure(config)
    knows_frozen = family_of(config).is_known or not config.model.freeze
    known = parts.attention and _is_known(config) and knows_frozen
    flops, formula = training_flops(config, trained, means) if known else (None, "")
    if isinstance(config.model, schema.CustomModel):
        flops, formula = config.model.flops_per_sample, "counted by operation"
    samples = means or full_samples(config)
    tokens = samples.source + (samples.target if config.targets.has_target else 0)
    if isinstance(config.data, schema.CustomData):
        tokens = 0.0  # samples are not known to have tokens
    architecture = getattr(config.model, "model_type", family_of(config).name)
    per_token = (Tokens.source, Tokens.target)
    return ModelSize(
        num_parameters=sum(prod(w.shape) for w in parts.weights),
        num_active_parameters=sum(w.num_active for w in parts.weights),
        num_trained_parameters=(
            sum(prod(w.shape) for w in trained.weights if w.trained) if _is_known(config) else None
        ),
        num_matmul_parameters=sum(w.num_active for w in parts.weights if w.tokens in per_token),
        flops_per_sample=flops,
        flops_formula=formula if flops is not None else f"unknown for {architecture}",
        tokens_per_sample=tokens,
    )


def adapted_layers(config: Config) -> tuple[str, ...]:
    """Return the sorted names of adapted layers inside the Transformer layer, () if unknown."""
    if not isinstance(config.peft, Adapters):
        return ()
    return tuple(sorted(choose_targets(config, linear_layers(structure(config))).modules))


def _is_known(config: Config) -> bool:
    """Return whether the trained weights are known. Adapters require names of layers."""
    return family_of(config).is_known or not isinstance(config.peft, Adapters)


def is_ragged(config: Config) -> bool:
    """Return whether samples may have different lengths."""
    if isinstance(config.data, schema.Synthetic):
        return config.data.lengths is not schema.Lengths.fixed
    return isinstance(config.data, schema.Rows | schema.Mix)


@dataclass(frozen=True)
class Targets:
    """Adapted layers by name inside the Transformer layer."""

    modules: frozenset[str]
    feed_forward: frozenset[str]
    """Adapted layers whose input is scaled by IA3."""
    unmatched: tuple[str, ...]
    """Names in `peft.target_modules` that match no layer."""


def choose_targets(config: Config, names: Iterable[str]) -> Targets:
    """Select the adapted layers from the names of linear layers inside the Transformer layer."""
    peft, paths = cast(Adapters, config.peft), frozenset(names)
    wanted: Sequence[str] | None = peft.target_modules
    if wanted is None:
        wanted = family_of(config).ia3_targets if is_ia3(config) else sorted(paths)
    found = {name: _named(name, paths) for name in wanted}
    modules = frozenset[str]().union(*found.values())
    scaled = (_named(name, paths) for name in family_of(config).scaled_inputs)
    unmatched = tuple(name for name in wanted if not found[name])
    return Targets(modules, modules & frozenset[str]().union(*scaled), unmatched)


def is_ia3(config: Config) -> bool:
    """Return whether the adapters are scales instead of matrices."""
    return isinstance(config.peft, Adapters) and not isinstance(config.peft, Lora)


def fuses_adapters(config: Config) -> bool:
    """Return whether `peft.fused` is set and possible."""
    return bool(getattr(config.peft, "fused", False)) and not why_not_fused(config)


def why_not_fused(config: Config) -> str:
    """Return the setting that requires PEFT's forward passes, "" if `peft.fused` is possible."""
    peft, ranks, precision = config.peft, config.ranks, config.precision
    if not isinstance(peft, Lora) or peft.option != "lora":
        return f"peft={peft.option}"
    if peft.dropout:
        return "peft.dropout"
    if peft.bias is not schema.TrainedBias.none and family_of(config).has_biases:
        return f"peft.bias={peft.bias.value}"
    if precision.weights is not schema.Weights.float32 or precision.float8 is not schema.Float8.off:
        return f"precision={precision.option}"
    # Other strategies gather, shard or copy a layer's weights when its module is called.
    return f"distributed={ranks.option}" if ranks.is_dp or ranks.shards_states else ""


def _named(name: str, paths: frozenset[str]) -> frozenset[str]:
    """Return the layer with this full name, else all layers whose names end in it."""
    if name in paths:
        return frozenset({name})
    return frozenset(path for path in paths if path.endswith(f".{name}"))


def linear_layers(structure: Structure) -> tuple[str, ...]:
    """Return the unique names of the linear layers in Transformer layers, () if unknown."""
    return tuple({w.module: None for w in structure.weights if w.module and len(w.shape) == 2})


def _adapt(config: Config, structure: Structure) -> Structure:
    """Return the structure with adapters, frozen weights and 4-bit weights."""
    if not isinstance(config.peft, Adapters):
        return freeze(config, structure)
    targets = choose_targets(config, linear_layers(structure))
    weights = (
        part for weight in structure.weights for part in _adapted_tensors(config, weight, targets)
    )
    return replace(structure, weights=tuple(weights))


_LAYER = re.compile(r"^.*?\.\d+\.")
"""Part of a tensor's name up to the layer number. Heads and embeddings do not match."""


def freeze(config: Config, structure: Structure) -> Structure:
    """Mark the weights of `model.freeze` as not trained; ConfigError: no match, or all frozen."""
    entries, family = config.model.freeze, family_of(config)
    if not entries or not family.is_known:
        return structure
    all_names = {w.names: w.trained for w in structure.weights}
    if problem := find_problem(entries, all_names, f"a {family.name} model with this task's head"):
        raise ConfigError(problem)
    weights = [
        replace(w, trained=w.trained and not is_frozen(entries, w.names)) for w in structure.weights
    ]
    first = next(place for place, weight in enumerate(weights) if weight.trained)
    for place, weight in enumerate(weights[:first]):
        if weight.place is not Role.embedding or weight.tokens is Tokens.none:
            weights[place] = replace(weight, backward=False)
    below, above = ({layer for w in part for layer in _LAYER.findall(w.names[0])}
                    for part in (weights[:first], weights[first:]))  # fmt: skip
    idle, (stack, *others) = len(below - above), structure.attention
    encoder = min(idle, stack.num_layers)
    attention = [replace(part, idle=idle - encoder) for part in others]
    return Structure(tuple(weights), (replace(stack, idle=encoder), *attention))


def _adapted_tensors(config: Config, weight: Weight, targets: Targets) -> Iterator[Weight]:
    if weight.is_head:
        # peft trains a copy and keeps the original.
        yield replace(weight, trained=False, tokens=Tokens.none)
        yield weight
        return
    chosen = weight.module in targets.modules
    peft = config.peft
    trains_bias = isinstance(peft, Lora) and peft.bias is schema.TrainedBias.lora_only
    if chosen and len(weight.shape) == 1 and trains_bias:
        yield weight
        return
    yield replace(weight, trained=False, four_bits=_is_stored_in_4_bits(config, weight))
    if (chosen and len(weight.shape) == 2) or (
        len(weight.shape) > 2 and getattr(peft, "experts", False)
    ):
        yield from _added(config, weight, weight.module in targets.feed_forward)


def _added(config: Config, weight: Weight, feed_forward: bool) -> Iterator[Weight]:
    *experts, out, inp = weight.shape
    if family_of(config).stores_transposed:
        out, inp = inp, out
    if not isinstance(config.peft, Lora):
        shape = (1, inp) if feed_forward else (out, 1)
        yield Weight(shape, is_adapter=True, is_scale=True)
        return
    rank = config.peft.r * prod(experts)
    for shape in ((rank, inp), (out, rank)):
        yield Weight(shape, weight.tokens, active=weight.active, is_adapter=True)
    if config.peft.is_dora:
        yield Weight((out,), is_adapter=True)


def _is_stored_in_4_bits(config: Config, weight: Weight) -> bool:
    if not isinstance(config.peft, schema.QLora):
        return False
    family = family_of(config)
    if not family.is_known:  # without names: all multiplied weights, a lower bound of bytes
        return weight.tokens is not Tokens.none
    name = weight.module.rpartition(".")[2]
    return len(weight.shape) > 1 and bool(name) and name not in family.float32_layers
