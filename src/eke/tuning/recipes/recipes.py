"""Adaptive recipes and their questions. The goal of each recipe: docs/reference/recipes.md.

fastest keeps AdamW's mathematics. large_model_one_gpu trains a model that fits as fastest does,
without its kernels. low_memory changes neither clipping nor the location of the state.
"""

from dataclasses import replace

from eke.common.text import format_bytes
from eke.config.schema import Compute, Packing
from eke.estimate.memory import Verdict
from eke.models.checkpoints.architecture import router_loss
from eke.models.sizes import is_ragged, most_predicted, why_not_fused
from eke.rules.techniques import TECHNIQUES, Published
from eke.tuning.recipe_search import Axis, Change, ChoiceContext, Chooser, Combination, RecipeOption
from eke.tuning.recipes.resolver import AdaptiveRecipe, Question
from eke.tuning.recipes.techniques import (
    DECIDES,
    STAYS,
    choose_16_bit,
    choose_16_bit_with_hint,
    compiler,
    fused_loss,
    loss,
    sparse,
)

_BATCH = ("batch", "batch.per_device", "batch.accumulation")
_BATCH_AUTO = ("batch=auto",)


def batch(situation: ChoiceContext) -> Question | None:
    """Choose the largest micro-batch. The samples of an optimizer step do not change."""
    if situation.device.memory_bytes is None or router_loss(situation.config) is not None:
        return None
    why = "the fewest forward passes that fit need the fewest kernel launches"
    return Question(_BATCH, (RecipeOption(_BATCH_AUTO, why),))


def attention(situation: ChoiceContext) -> Question | None:
    """Choose the device's own kernel if its package is installed, else PyTorch's choice."""
    if situation.device.kind != "cuda":
        return None
    wide = situation.config.precision.compute is Compute.float32
    candidates = []
    if situation.device.capability == (9, 0) and not wide:  # Hopper
        why = "1.5 to 2 times as fast as FlashAttention-2 on an H100 (arXiv:2407.08608)"
        candidates.append(RecipeOption(("attention=flash3",), why))
    if is_ragged(situation.config) and not wide:
        why = "reads the lengths of samples and skips padding (arXiv:2307.08691)"
        candidates.append(RecipeOption(("attention=flash2",), why))
    why = "PyTorch chooses a fused kernel, and the record names it"
    candidates.append(RecipeOption(("attention=sdpa",), why))
    return Question(("attention",), tuple(candidates))


def _packing(situation: ChoiceContext) -> Question | None:
    """Pack samples if the kernel reads their lengths. Other kernels would need a large mask."""
    config = situation.config
    if not is_ragged(config) or config.attention.option not in ("flash2", "flash3"):
        return None
    if config.data.packing is not Packing.off:
        return None
    why = "the same samples without padding: up to twice the speed (arXiv:2407.09105)"
    return Question(("data.packing",), (RecipeOption(("data.packing=padding_free",), why),))


def _fused_loss_question(situation: ChoiceContext) -> Question | None:
    """Choose the fused loss if the logits take a large share of a step's memory."""
    found = situation.forecast_whole
    if situation.device.kind != "cuda" or found is None:
        return None
    config = situation.whole
    tokens = config.target_len or config.data.seq_len
    positions = most_predicted(config, config.batch.per_device or 1, tokens)
    logits = 2 * 4 * positions * config.model.vocab_size  # float32 logits and their gradient
    share = logits / (logits + found.components.get("activations", 0))
    # A choice: they were 11.7 of 44.5 GiB for a Llama with 1B parameters (notes/lab/recipes.md).
    if share < 0.25:
        return None
    why = f"float32 logits and their gradient would be {format_bytes(logits)}, "
    why += f"{share:.0%} of the memory for a step's samples"
    candidate = RecipeOption(fused_loss(situation), why)
    decides = ("kernels", "kernels.fused_linear_cross_entropy")
    return Question(decides, (candidate,), otherwise=STAYS, shrinks=True)


def workers(situation: ChoiceContext) -> Question | None:
    """Choose background workers for batches if there are enough cores."""
    if situation.device.kind != "cuda" or situation.cores <= 2:
        return None
    why = "batches are prepared in the background and copied from page-locked memory"
    decides = ("dataloader", "dataloader.workers")
    return Question(decides, (RecipeOption(("dataloader=workers",), why),))


def _adapters(situation: ChoiceContext) -> Question | None:
    """Choose fused adapters, with fewer passes over memory."""
    if why_not_fused(situation.config):
        return None
    why = "a LoRA layer moves a fifth fewer bytes without compilation (notes/lab/techniques.md)"
    return Question(("peft.fused",), (RecipeOption(("peft.fused=true",), why),))


FASTEST = AdaptiveRecipe(
    "fastest",
    first=(choose_16_bit_with_hint, batch),
    # CUDA graphs, if `compiler` chooses them, exclude `sparse`.
    then=(attention, _packing, compiler, sparse, _fused_loss_question, _adapters, workers),
    menu=(
        ("precision=bf16", "batch=auto", "dataloader=workers",
         "kernels=fused_linear_cross_entropy", "attention=sdpa"),
    ),
)  # fmt: skip


_8_BIT = ("optimizer=adamw_8bit", "optimizer=adamw_torchao_8bit")
_PURE = TECHNIQUES["precision=bf16_pure optimizer=adamw_bf16_sr"]
# No slower than the 16-bit products chosen before.
_WEIGHTS = Axis((*DECIDES, "optimizer"), (replace(_PURE, published=Published(1.0, "")),))
_RECOMPUTED = ("memory=checkpointing_selective", "memory=checkpointing")
_WHERE = Axis.of(
    ("distributed", "distributed.num_processes", "offload"),
    "distributed=zero2 distributed.num_processes=1 offload=optimizer_cpu",
    "distributed=zero3 distributed.num_processes=1 offload=params_cpu",
)


def _search_for_fit(
    situation: ChoiceContext, claims: frozenset[str], change: Change
) -> list[RecipeOption]:
    """Return the mildest combination that fits the smallest micro-batch, else the smallest one."""
    names = [*_RECOMPUTED]
    if situation.config.train.max_grad_norm is None:  # else the norm needs all gradients
        names += ["memory=optimizer_in_backward"]
        names += ["memory=checkpointing memory.optimizer_in_backward=true"]
    recomputation = Axis.of(("memory", "memory.checkpointing"), *names)
    states = Axis.of(("optimizer",), *_8_BIT)
    axes = (loss(situation), recomputation, states, _WEIGHTS, _WHERE)
    chooser = Chooser(situation, claims, change, axes)
    best = chooser.mildest_that_fits()
    return [] if best is None else chooser.explained(best)


def _conclusion(situation: ChoiceContext) -> str:
    """Return the memory result for the plan's own row."""
    found = situation.forecast
    if found is None or found.capacity is None:
        return "the device's memory is unknown: no memory technique was chosen"
    size = f"{format_bytes(found.peak.expected)} expected of {format_bytes(found.capacity)}"
    if found.verdict is not Verdict.does_not_fit:
        count = situation.smallest.batch.per_device
        return f"{found.verdict.value}: {size} with batch.per_device={count}"
    less = ". peft=qlora trains less of the model" if not situation.config.peft.is_on else ""
    return f"no known technique makes it fit: {size}{less}"


LARGE_MODEL = AdaptiveRecipe(
    "large_model_one_gpu",
    first=(choose_16_bit, batch),
    then=(sparse,),
    search=_search_for_fit,
    conclusion=_conclusion,
    menu=(
        ("precision=bf16", "batch=auto", "optimizer=adamw_8bit", "memory=checkpointing",
         "kernels=fused_linear_cross_entropy"),
        ("optimizer=adamw_torchao_8bit", "memory=checkpointing_selective"),
    ),
)  # fmt: skip


def _lowest_memory(
    situation: ChoiceContext, claims: frozenset[str], change: Change
) -> list[RecipeOption]:
    """Return the combination with the lowest forecast."""
    states = Axis.of(("optimizer",), "optimizer=adafactor", *_8_BIT)
    recomputation = Axis.of(("memory", "memory.checkpointing"), *_RECOMPUTED)
    axes = (states, recomputation, loss(situation))
    chooser = Chooser(situation, claims, change, axes)
    best = chooser.least_memory()
    if best is None:
        return []
    found = chooser.explained(best)
    if _should_split_micro_batch(best, claims, change):
        size = format_bytes(best.forecast.peak.expected)
        why = f"{size} needed at batch.per_device={best.situation.config.batch.per_device}"
        found.append(RecipeOption(_BATCH_AUTO, f"{why}, so batch=auto takes as many as fit"))
    return found


def _should_split_micro_batch(best: Combination, claims: frozenset[str], change: Change) -> bool:
    """Return whether a step's samples do not fit at once, and smaller micro-batches save memory."""
    whole = best.forecast
    if whole.verdict is not Verdict.does_not_fit or not claims.isdisjoint(_BATCH):
        return False
    cut = change(best.situation, _BATCH_AUTO)
    if cut is None or best.situation.found.objection(cut.found, ("batch",)) or cut.forecast is None:
        return False
    return cut.forecast.peak.expected < whole.peak.expected


LOW_MEMORY = AdaptiveRecipe(
    "low_memory",
    first=(choose_16_bit,),
    then=(sparse,),
    search=_lowest_memory,
    menu=(
        ("precision=bf16", "optimizer=adafactor", "memory=checkpointing",
         "kernels=fused_linear_cross_entropy"),
    ),
)  # fmt: skip
