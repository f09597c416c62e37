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

from eke.schema import Config, Seq2SeqLM
from eke.sizes.labels import predicted_frac
from eke.sizes.structure import Attention, Structure, Tokens, Weight

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


def tokens_per_sample(config: Config) -> dict[Tokens, float]:
    """How many vectors of one sample each kind of weight is multiplied with."""
    source = config.data.seq_len
    target = source  # T5 classification feeds the input, shifted right, to its decoder
    if config.task.option == "seq2seq_lm":
        target = cast(Seq2SeqLM, config.task).target_len or source
    return {
        Tokens.none: 0,
        Tokens.source: source,
        Tokens.target: target,
        Tokens.predicted: predicted_frac(config) * target,
        Tokens.sample: 1,
    }


def training_flops(config: Config, structure: Structure) -> Flops:
    """Model FLOPs of one forward and backward pass over one sample of `data.seq_len` tokens.

    Source: the two papers named at the top of this file.
    """
    tokens = tokens_per_sample(config)
    matmul = sum(_per_parameter(w) * w.num_active * tokens[w.tokens] for w in structure.weights)
    attention = sum(attention_flops(a, tokens) for a in structure.attention)
    return Flops(float(matmul), float(attention), _formula(structure, tokens))


def _per_parameter(weight: Weight) -> int:
    return PER_PARAMETER if weight.trained else PER_FROZEN_PARAMETER


def attention_flops(attention: Attention, tokens: dict[Tokens, float]) -> float:
    """Training FLOPs per sample of one stack's attention."""
    scores = tokens[attention.queries] * tokens[attention.keys] * (0.5 if attention.causal else 1)
    return PER_SCORE * attention.num_layers * attention.width * scores


def _formula(structure: Structure, tokens: dict[Tokens, float]) -> str:
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
            parts.append(f"{factor} x {size}{words} x {tokens[kind]:.10g} {unit}")
    parts += [
        f"{PER_SCORE} x {a.num_layers} layers x {a.width} x {tokens[a.queries]} x "
        f"{tokens[a.keys]}{' / 2 (causal)' if a.causal else ''}"
        for a in structure.attention
    ]
    return " + ".join(parts)
