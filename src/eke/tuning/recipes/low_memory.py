"""recipe=low_memory: the least memory that techniques of a step's own cost can reach.

Numerics: products in 16 bits; another optimizer than AdamW (Adafactor, else AdamW with moments of
8 bits); float32 weights. Products are TF32's, or float32's, where copies in 16 bits need more than
they save. Clipping and where state lives stay as typed, and so does the micro-batch where it fits.
"""

from collections.abc import Callable

from eke.common.units import format_bytes
from eke.estimate.memory import Forecast, Verdict
from eke.tuning.recipes.combination_search import Axis, Mix, Mixer
from eke.tuning.recipes.formats import DECIDES, half
from eke.tuning.recipes.question import Candidate, Change, Recipe, Situation
from eke.tuning.recipes.techniques import (
    ADAFACTOR,
    ADAMW_8BIT,
    RECOMPUTATION,
    TORCHAO_8BIT,
    loss,
    sparse,
)

STATES = Axis(("optimizer",), (ADAFACTOR, ADAMW_8BIT, TORCHAO_8BIT))

WIDE = (("precision=tf32",), ("precision=fp32",))
"""Products without copies, the faster ones first; the last is what is there as long as nobody
decides."""
PURE = ("precision=bf16_pure",)
PIECES = ("batch=auto",)

WORTH = 1.1
"""A peak so many times as high is worth slower products: a choice."""

BATCH = ("batch", "batch.per_device", "batch.accumulation")

AS_GOOD = 1.01
"""Peaks within this of the least are one: of those the mildest is taken. Formulas are no better
than a few per cent (docs/forecast.md)."""


ROOM = {Verdict.fits: 0, Verdict.tight: 1}
"""Of combinations that are as good those with room come first."""


def least(
    situation: Situation, is_decided: Callable[[str], bool], change: Change
) -> list[Candidate]:
    """The combination with the lowest forecast."""
    mixer, best = lowest(situation, is_decided, change)
    if best is None:
        return []
    found, cut = [], in_pieces(best, is_decided, change)
    wide = None if any(map(is_decided, DECIDES)) else without_copies(best, cut, situation, change)
    if wide is not None:
        candidate, situation = wide
        mixer, again = lowest(situation, is_decided, change)
        found, best = [candidate], again or best
        cut = in_pieces(best, is_decided, change)
    return [*found, *mixer.told(best), *([] if cut is None else [told_of_pieces(best)])]


def lowest(
    situation: Situation, is_decided: Callable[[str], bool], change: Change
) -> tuple[Mixer, Mix | None]:
    """The mildest of the combinations with the lowest forecast; None: nothing can be forecast."""
    mixer = Mixer.of(situation, is_decided, change, (STATES, RECOMPUTATION, loss(situation)))
    mixes = list(mixer.mixes())
    least = min((mix.forecast.peak.expected for mix in mixes), default=0)
    good = [mix for mix in mixes if mix.forecast.peak.expected <= AS_GOOD * least]
    return mixer, min(good, key=lambda mix: ROOM.get(mix.forecast.verdict, len(ROOM)), default=None)


def without_copies(
    mix: Mix, cut: Situation | None, situation: Situation, change: Change
) -> tuple[Candidate, Situation] | None:
    """Products of float32 weights, where copies in 16 bits need more memory than they save.

    Autocast keeps copies of float32 weights. Where all of them are trained, gradients and states
    take their place later in the step; where adapters are, nothing does.
    """
    for overrides in WIDE:
        plain = change(situation, overrides)
        if plain is not None and not situation.found.new_in(plain.found, ("precision",)):
            break
    else:
        return None
    narrow, wide = mix.situation, change(mix.situation, overrides)
    if wide is None or wide.forecast is None or not saves_enough(mix, cut, wide.forecast):
        return None
    before, after = (format_bytes(m.peak.expected) for m in (mix.forecast, wide.forecast))
    why = (
        f"{after} expected, {before} with precision={narrow.config.precision.option}, which keeps "
        "16-bit copies of the weights, whether they are trained or not"
    )
    pure = change(narrow, PURE)
    if pure and pure.forecast and pure.found.refused.keys() <= narrow.found.refused.keys():
        why += f"; {PURE[0]}, other numerics, has them in 16 bits alone: "
        why += format_bytes(pure.forecast.peak.expected)
    return Candidate(overrides, why), plain


def saves_enough(mix: Mix, cut: Situation | None, wide: Forecast) -> bool:
    """Whether slower products, TF32's or float32's, are worth what they save."""
    found = mix.forecast if cut is None else cut.forecast
    makes_room = found is None or found.verdict is Verdict.does_not_fit
    worth = mix.forecast.peak.expected >= WORTH * wide.peak.expected
    return worth or (makes_room and wide.verdict in ROOM)


def in_pieces(mix: Mix, is_decided: Callable[[str], bool], change: Change) -> Situation | None:
    """A step's samples in smaller pieces, where they do not fit at once and pieces need less.

    They may need more: gradients are kept from one to the next.
    """
    whole = mix.forecast
    if whole.verdict is not Verdict.does_not_fit or any(map(is_decided, BATCH)):
        return None
    cut = change(mix.situation, PIECES)
    if cut is None or mix.situation.found.new_in(cut.found, ("batch",)) or cut.forecast is None:
        return None
    return cut if cut.forecast.peak.expected < whole.peak.expected else None


def told_of_pieces(mix: Mix) -> Candidate:
    """Why a step's samples are cut."""
    size, count = format_bytes(mix.forecast.peak.expected), mix.situation.config.batch.per_device
    why = f"{size} would be needed at batch.per_device={count}"
    return Candidate(PIECES, f"{why}; as many at once as fit")


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
