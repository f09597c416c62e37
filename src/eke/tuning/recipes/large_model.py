"""recipe=large_model_one_gpu: a model whose weights, gradients and states do not fit as they are.

Numerics: products in 16 bits, then what has to be: the mildest combination with which the forecast
has room is taken, so that a model that fits is trained as by recipe=fastest without its kernels.
"""

from collections.abc import Callable

from eke.common.units import format_bytes
from eke.estimate.memory import Verdict
from eke.tuning.recipes.combination_search import Axis, Mix, Mixer
from eke.tuning.recipes.fastest import batch
from eke.tuning.recipes.formats import half
from eke.tuning.recipes.question import Candidate, Change, Recipe, Situation
from eke.tuning.recipes.techniques import (
    ADAMW_8BIT,
    FULL,
    IN_BACKWARD,
    RECOMPUTED_IN_BACKWARD,
    ROUNDED_AT_RANDOM,
    SELECTIVE,
    TORCHAO_8BIT,
    WHERE,
    loss,
    sparse,
)

STATES = Axis(("optimizer",), (ADAMW_8BIT, TORCHAO_8BIT))
WEIGHTS = Axis(
    ("precision", "precision.compute", "precision.weights", "precision.float8", "optimizer"),
    (ROUNDED_AT_RANDOM,),
)


def room_for_it(
    situation: Situation, is_decided: Callable[[str], bool], change: Change
) -> list[Candidate]:
    """The mildest combination that fits with the smallest micro-batch; else what needs least."""
    ways = [SELECTIVE, FULL]
    if situation.config.train.max_grad_norm is None:  # else a norm of all gradients is needed
        ways += [IN_BACKWARD, RECOMPUTED_IN_BACKWARD]
    recomputation = Axis(("memory", "memory.checkpointing"), tuple(ways))
    axes = (loss(situation), recomputation, STATES, WEIGHTS, WHERE)
    mixer = Mixer.of(situation, is_decided, change, axes)
    tried: list[Mix] = []
    for mix in mixer.mixes():
        if mix.forecast.verdict is Verdict.unknown:
            return []
        tried.append(mix)
        if mix.forecast.verdict is Verdict.fits:
            return mixer.told(mix)
    tight = [mix for mix in tried if mix.forecast.verdict is Verdict.tight]
    if not tried:
        return []
    best = tight[0] if tight else min(tried, key=lambda mix: mix.forecast.peak.expected)
    return mixer.told(best)


def conclusion(situation: Situation) -> str:
    """Whether there is room now, for the plan's own row."""
    found = situation.forecast
    if found is None or found.capacity is None:
        return "the device's memory is not known: nothing was chosen for it"
    size = f"{format_bytes(found.peak.expected)} expected of {format_bytes(found.capacity)}"
    count = situation.smallest.batch.per_device
    words = {
        Verdict.fits: f"fits: {size} with batch.per_device={count}",
        Verdict.tight: f"may just fit: {size} with batch.per_device={count}",
    }
    lost = f"nothing that is known makes it fit: {size}; peft=qlora trains less of the model"
    return words.get(found.verdict, lost)


LARGE_MODEL = Recipe(
    "large_model_one_gpu",
    first=(half, batch),
    then=(sparse,),
    search=room_for_it,
    conclusion=conclusion,
    menu=(
        ("precision=bf16", "batch=auto", "optimizer=adamw_8bit", "memory=checkpointing",
         "kernels=fused_linear_cross_entropy"),
        ("optimizer=adamw_torchao_8bit", "memory=checkpointing_selective"),
    ),
)  # fmt: skip
