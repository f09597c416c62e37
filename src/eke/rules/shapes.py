"""Rules about sizes that tensor cores like: multiples of a format's unit, in every dimension.

cuBLAS 11 uses tensor cores for any size, at best with multiples of 16 bytes, on an A100 of 128.
"""

import math

from eke.common.units import format_value
from eke.config.schema import Compute, PretrainedModel, SequenceClassification, Switch
from eke.rules.rule import Facts, Rule, Verdict

NVIDIA = (
    "https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/"
    "index.html#requirements-tc"
)
A100 = (8, 0)

Unit = tuple[int, str]


def _unit(facts: Facts) -> Unit | None:
    """Best divisor of each side of a product, and the format; None where no tensor cores run."""
    if facts.device.kind != "cuda" or (facts.device.capability or (0, 0)) < (7, 0):
        return None
    precision = facts.config.precision
    if precision.compute is not Compute.float32:
        return (64 if facts.device.capability == A100 else 8), precision.compute.value
    if precision.tf32 is Switch.on:
        return (32 if facts.device.capability == A100 else 4), "TF32"
    return None


def _divisor(facts: Facts) -> int:
    unit = _unit(facts)
    return unit[0] if unit else 1


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _is_multiplied(key: str, facts: Facts) -> bool:
    """Whether a size is a side of a product: a classifier's vocabulary is only looked up."""
    return key != "vocab_size" or not isinstance(facts.config.task, SequenceClassification)


def _model_rule(key: str, what: str) -> Rule:
    """A side of the model's weights; a checkpoint has the sides it has."""

    def size(facts: Facts) -> int:
        return int(getattr(facts.config.model, key))

    def fix(facts: Facts) -> str:
        unit = _divisor(facts)
        if key == "hidden_size":  # which its heads divide, into even widths
            unit = math.lcm(unit, 2 * max(1, facts.config.model.num_attention_heads))
        return f"model.{key}={_up(size(facts), unit)}"

    return Rule(
        id=f"tensor_cores_like_{key}",
        verdict=Verdict.no_benefit,
        path=f"model.{key}",
        when=lambda f: (
            not isinstance(f.config.model, PretrainedModel)
            and _is_multiplied(key, f)
            and size(f) % _divisor(f) != 0
        ),
        value=size,
        why=lambda f: f"{_why(f)} {what}",
        fix=fix,
        source=NVIDIA,
    )


def _why(facts: Facts) -> str:
    unit = _unit(facts)
    assert unit is not None, "asked for a problem that is not there"
    divisor, name = unit
    return f"{facts.device.name} is fastest in {name} with multiples of {divisor};"


def _tokens(facts: Facts) -> int:
    return facts.config.batch.micro_batch * facts.config.data.seq_len


def _batch_fix(facts: Facts) -> str:
    """The nearest smaller batch that is aligned, or the smallest one there is."""
    config = facts.config
    step = _divisor(facts) // math.gcd(_divisor(facts), config.data.seq_len)
    good = max(step, config.batch.micro_batch // step * step)
    target, together = config.batch.target, good * config.distributed.num_processes
    if target is not None and target % together:
        return f"batch.per_device={good} batch.target={_up(target, together)}"
    return f"batch.per_device={good}"


RULES = (
    _model_rule("vocab_size", "ids that nothing uses cost less than a crooked output layer"),
    _model_rule("hidden_size", "it is a side of every layer"),
    _model_rule("intermediate_size", "it is a side of every feed-forward layer"),
    Rule(
        id="tensor_cores_like_token_count",
        verdict=Verdict.no_benefit,
        path="batch.per_device",
        when=lambda f: _tokens(f) % _divisor(f) != 0,
        value=lambda f: f.config.batch.micro_batch,
        why=lambda f: (
            f"{_why(f)} a micro-batch has {format_value(_tokens(f))} tokens "
            f"({f.config.batch.micro_batch} x data.seq_len {f.config.data.seq_len})"
        ),
        fix=_batch_fix,
        source=NVIDIA,
    ),
)
