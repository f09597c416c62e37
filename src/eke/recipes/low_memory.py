"""recipe=low_memory: the least memory that techniques of a step's own cost can reach.

Numerics: products in 16 bits; another optimizer than AdamW (Adafactor, else AdamW with moments of
8 bits); float32 weights. Clipping and where state lives stay as typed, and so does the micro-batch
where it fits.
"""

from collections.abc import Callable

from eke.forecast import Verdict
from eke.recipes.formats import STAYS, half
from eke.recipes.search import Axis, Mixer
from eke.recipes.ways import ADAFACTOR, ADAMW_8BIT, RECOMPUTATION, TORCHAO_8BIT, loss, sparse
from eke.recipes.wish import Candidate, Change, Recipe, Situation, Wish
from eke.units import format_bytes

STATES = Axis(("optimizer",), (ADAFACTOR, ADAMW_8BIT, TORCHAO_8BIT))

AS_GOOD = 1.01
"""Peaks within this of the least are one: of those the mildest is taken. Formulas are no better
than a few per cent (docs/forecast.md)."""


def least(
    situation: Situation, is_decided: Callable[[str], bool], change: Change
) -> list[Candidate]:
    """The combination with the lowest forecast."""
    mixer = Mixer.of(situation, is_decided, change, (STATES, RECOMPUTATION, loss(situation)))
    mixes = list(mixer.mixes())
    if not mixes:
        return []
    lowest = min(mix.forecast.peak.expected for mix in mixes)
    return mixer.told(next(m for m in mixes if m.forecast.peak.expected <= AS_GOOD * lowest))


def fewer_at_once(situation: Situation) -> Wish | None:
    """A step's samples in smaller pieces, where they do not fit with all of that."""
    found = situation.forecast
    if found is None or found.verdict is not Verdict.does_not_fit:
        return None
    why = (
        f"{format_bytes(found.peak.expected)} would be needed at "
        f"batch.per_device={situation.config.batch.per_device}; as many at once as fit"
    )
    decides = ("batch", "batch.per_device", "batch.accumulation")
    return Wish(decides, (Candidate(("batch=auto",), why),), otherwise=STAYS)


LOW_MEMORY = Recipe(
    "low_memory",
    first=(half,),
    then=(sparse,),
    search=least,
    last=(fewer_at_once,),
    menu=(
        ("precision=bf16", "optimizer=adafactor", "memory=checkpointing",
         "kernels=fused_linear_cross_entropy"),
    ),
)  # fmt: skip
