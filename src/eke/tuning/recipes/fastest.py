"""recipe=fastest: what makes a step shorter and leaves AdamW's mathematics as they are.

Numerics: products in bfloat16 by autocast (float16 with loss scaling where a GPU has no bfloat16),
float32 weights, gradients, states and reductions.
"""

from eke.common.units import format_bytes
from eke.config.schema import Compute, Packing
from eke.models.sizes import is_ragged, most_predicted
from eke.tuning.recipes.compile import compiler
from eke.tuning.recipes.formats import STAYS, half_and_hint
from eke.tuning.recipes.question import Ask, Candidate, Recipe, Situation, Wish
from eke.tuning.recipes.techniques import computed_again, fused_loss, sparse

HOPPER = (9, 0)

LOGITS_BYTES = 2 * 4
"""Of a token and an entry of the vocabulary: a float32 number, and its gradient."""
HEAVY_SHARE = 0.25
"""Of a sample's memory, from which the fused loss is worth its operations: a choice. They were 11.7
of 44.5 GiB of a Llama of 1B parameters in all (docs/lab.md, "recipes that adapt")."""

WORKERS = 2


def batch(situation: Situation) -> Wish | None:
    """The largest micro-batch; the samples of an optimizer step stay."""
    decides = ("batch", "batch.per_device", "batch.accumulation")
    if situation.device.memory_bytes is None:
        return None
    why = "one pass over all samples of a step, or as many as fit, leaves the fewest launches"
    return Wish(decides, (Candidate(("batch=auto",), why),))


def attention(situation: Situation) -> Wish | None:
    """A kernel for the very device, where its package is here; else PyTorch's choice."""
    if situation.device.kind != "cuda":
        return None
    wide = situation.config.precision.compute is Compute.float32
    candidates = []
    if situation.device.capability == HOPPER and not wide:
        why = "1.5 to 2 times as fast as FlashAttention-2 on an H100 (arXiv:2407.08608)"
        candidates.append(Candidate(("attention=flash3",), why))
    if is_ragged(situation.config) and not wide:
        why = "reads the lengths of samples, so that padding costs nothing (arXiv:2307.08691)"
        candidates.append(Candidate(("attention=flash2",), why))
    why = "PyTorch chooses among its fused kernels, and the record says which one ran"
    candidates.append(Candidate(("attention=sdpa",), why))
    return Wish(("attention",), tuple(candidates))


def packing(situation: Situation) -> Wish | None:
    """Samples end to end where the kernel reads their lengths; others would need a large mask."""
    config = situation.config
    if not is_ragged(situation.config) or config.attention.option not in ("flash2", "flash3"):
        return None
    if config.data.packing is not Packing.off:
        return None
    why = "the same samples without padding: up to twice the speed (arXiv:2407.09105)"
    return Wish(("data.packing",), (Candidate(("data.packing=padding_free",), why),))


def loss(situation: Situation) -> Wish | None:
    """Never all logits at once, where samples need much of their memory for them."""
    found = situation.forecast_whole
    if situation.device.kind != "cuda" or found is None:
        return None
    config = situation.whole
    tokens = getattr(config.task, "target_len", None) or config.data.seq_len
    positions = most_predicted(config, config.batch.per_device or 1, tokens)
    logits = LOGITS_BYTES * positions * config.model.vocab_size
    share = logits / (logits + found.components.get("activations", 0))
    if share < HEAVY_SHARE:
        return None
    why = (
        f"float32 logits and their gradient would be {format_bytes(logits)}, {share:.0%} of what "
        f"a step's samples need; it computes {computed_again(situation):.0%} more"
    )
    candidate = Candidate(fused_loss(situation), why)
    decides = ("kernels", "kernels.fused_linear_cross_entropy")
    return Wish(decides, (candidate,), otherwise=STAYS, shrinks=True)


def workers(situation: Situation) -> Wish | None:
    """Batches are made beside the training, where there are cores for it."""
    if situation.device.kind != "cuda" or situation.cores <= WORKERS:
        return None
    why = "batches are made beside the training and copied from page-locked memory"
    decides = ("dataloader", "dataloader.workers")
    return Wish(decides, (Candidate(("dataloader=workers",), why),))


QUESTIONS: tuple[Ask, ...] = (attention, packing, compiler, sparse, loss, workers)
"""CUDA graphs, where they are chosen, leave no room for `sparse`; what it leaves is for `loss`."""

FASTEST = Recipe(
    "fastest",
    first=(half_and_hint, batch),
    then=QUESTIONS,
    menu=(
        ("precision=bf16", "batch=auto", "dataloader=workers",
         "kernels=fused_linear_cross_entropy", "attention=sdpa"),
    ),
)  # fmt: skip
