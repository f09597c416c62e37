"""Model FLOPs of one training step: what the mathematics needs, whatever the implementation does.

6 per matrix-multiplied parameter and token (2 forward, 4 backward) and 12 L S h per token for the
two products of attention: Chowdhery et al. 2022, arXiv:2204.02311, appendix B. Causal attention
counts half, because half of the score matrix is masked: Dao 2023, arXiv:2307.08691, section 4.1
(PaLM counts it in full; implementations that compute the masked half do more work than this).
Of a mixture of experts only those count that a token passes through.
A frozen weight needs no gradient of its own, only that of its input: 4 instead of 6 (Hu et al.
2021, arXiv:2106.09685, section 4.2). Where nothing below a layer is trained not even that is
needed; it is counted, at most the first layer's attention projections.
Positions without a label, where the projection onto the vocabulary skips them, are not counted.
Left out: norms, activations, softmax, dropout, rotary positions, the loss, the optimizer's own
arithmetic, and recomputation, which is overhead and no model FLOPs.
"""

from dataclasses import dataclass
from math import prod
from typing import cast

from eke.config.schema import Config, Seq2SeqLM
from eke.models.sizes.predicted_positions import predicted_frac
from eke.models.sizes.structure import Attention, Structure, Tokens, Weight

PER_PARAMETER = 6
"""Forward multiply and add, and twice that backward: arXiv:2204.02311, appendix B."""
PER_FROZEN_PARAMETER = 4
"""Without the gradient of the weight itself."""
PER_SCORE = 12
"""Two products of attention, 2 FLOPs each, three times (forward, two gradients): same source."""


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one training step, per sample."""

    matmul: float
    """Of weights with activations."""
    attention: float
    """Of queries with keys, and of scores with values."""
    formula: str

    @property
    def total(self) -> float:
        """Both parts."""
        return self.matmul + self.attention


Counts = dict[Tokens | tuple[Tokens, Tokens], float]
"""Of one sample, the vectors of each kind, and the products of two kinds."""


@dataclass(frozen=True)
class SampleMeans:
    """Means over the samples of a training: tokens, and products of them that attention needs."""

    source: float
    target: float
    """The same as `source` but in seq2seq_lm: T5 gives a classifier's input to its decoder, too."""
    source_by_source: float
    target_by_target: float
    target_by_source: float


def full_samples(config: Config) -> SampleMeans:
    """All samples have `data.seq_len` tokens."""
    source = target = config.data.seq_len
    if config.task.option == "seq2seq_lm":
        target = cast(Seq2SeqLM, config.task).target_len or source
    return SampleMeans(source, target, source * source, target * target, target * source)


def tokens_per_sample(config: Config, means: SampleMeans | None = None) -> Counts:
    """How many vectors of one sample each kind of weight, or of attention, is multiplied with."""
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


def training_flops(config: Config, structure: Structure, means: SampleMeans | None = None) -> Flops:
    """Model FLOPs of one forward and backward pass over one sample, the mean of a training's.

    Source: the two papers named at the top of this file.

    Args:
        config: of the run.
        structure: of its model.
        means: of its samples; None where each has `data.seq_len` tokens.
    """
    tokens = tokens_per_sample(config, means)
    matmul = sum(_per_parameter(w) * w.num_active * tokens[w.tokens] for w in structure.weights)
    attention = sum(attention_flops(a, tokens) for a in structure.attention)
    return Flops(float(matmul), float(attention), _formula(structure, tokens))


def _per_parameter(weight: Weight) -> int:
    return PER_PARAMETER if weight.trained else PER_FROZEN_PARAMETER


def attention_flops(attention: Attention, tokens: Counts) -> float:
    """Training FLOPs per sample of one stack's attention."""
    scores = tokens[attention.queries, attention.keys] * (0.5 if attention.causal else 1)
    return PER_SCORE * attention.num_layers * attention.width * scores


def _formula(structure: Structure, tokens: Counts) -> str:
    """The sum in numbers: `6 x 803840 x 256 tokens + 12 x 4 layers x 128 x 256 x 256 / 2`."""
    units = {
        Tokens.source: "tokens",
        Tokens.target: "decoder tokens",
        Tokens.predicted: "predicted tokens",
        Tokens.sample: "per sample",
    }
    parts = []
    for kind, unit in units.items():
        for trained in (True, False):
            counted = [w for w in structure.weights if (w.trained, w.tokens) == (trained, kind)]
            if not counted:
                continue
            factor = PER_PARAMETER if trained else PER_FROZEN_PARAMETER
            active = any(w.num_active != prod(w.shape) for w in counted)
            words = f"{' active' if active else ''}{'' if trained else ' frozen'}"
            size = sum(w.num_active for w in counted)
            parts.append(f"{factor} x {size}{words} x {_short(tokens[kind])} {unit}")
    parts += [
        f"{PER_SCORE} x {a.num_layers} layers x {a.width} x {_scores(a, tokens)}"
        f"{' / 2 (causal)' if a.causal else ''}"
        for a in structure.attention
    ]
    return " + ".join(parts)


def _scores(attention: Attention, tokens: Counts) -> str:
    queries, keys = tokens[attention.queries], tokens[attention.keys]
    found = tokens[attention.queries, attention.keys]
    if found == queries * keys:
        return f"{_short(queries)} x {_short(keys)}"
    return f"{_short(found)} (mean of tokens x tokens)"


def _short(mean: float) -> str:
    """Whole numbers as they are, means to four digits or one decimal."""
    if mean == int(mean):
        return str(int(mean))
    return f"{mean:.4g}" if mean < 1000 else f"{mean:.1f}"
