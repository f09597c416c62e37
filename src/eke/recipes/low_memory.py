"""recipe=low_memory: the least memory that techniques of a step's own cost can reach.

Numerics: products in 16 bits; another optimizer than AdamW (Adafactor, else AdamW with moments of
8 bits); float32 weights. Clipping and where state lives stay as typed, and so does the micro-batch
where it fits.
"""

from collections.abc import Callable, Iterator

from eke.forecast import Verdict
from eke.recipes.formats import half
from eke.recipes.search import Axis, Mix, Mixer
from eke.recipes.ways import ADAFACTOR, ADAMW_8BIT, RECOMPUTATION, TORCHAO_8BIT, loss, sparse
from eke.recipes.wish import Candidate, Change, Recipe, Situation
from eke.units import format_bytes

STATES = Axis(("optimizer",), (ADAFACTOR, ADAMW_8BIT, TORCHAO_8BIT))

BATCH = ("batch", "batch.per_device", "batch.accumulation")

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
    best = next(m for m in mixes if m.forecast.peak.expected <= AS_GOOD * lowest)
    return [*mixer.told(best), *in_pieces(best, is_decided, change)]


def in_pieces(mix: Mix, is_decided: Callable[[str], bool], change: Change) -> Iterator[Candidate]:
    """A step's samples in smaller pieces, where they do not fit at once and pieces need less.

    They may need more: gradients are kept from one to the next.
    """
    whole = mix.forecast
    if whole.verdict is not Verdict.does_not_fit or any(map(is_decided, BATCH)):
        return
    cut = change(mix.situation, ("batch=auto",))
    if cut is None or mix.situation.found.new_in(cut.found, ("batch",)) or cut.forecast is None:
        return
    if cut.forecast.peak.expected < whole.peak.expected:
        count = mix.situation.config.batch.per_device
        why = f"{format_bytes(whole.peak.expected)} would be needed at batch.per_device={count}"
        yield Candidate(("batch=auto",), f"{why}; as many at once as fit")


LOW_MEMORY = Recipe(
    "low_memory",
    first=(half,),
    then=(sparse,),
    search=least,
    menu=(
        ("precision=bf16", "optimizer=adafactor", "memory=checkpointing",
         "kernels=fused_linear_cross_entropy"),
    ),
)  # fmt: skip
