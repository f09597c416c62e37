"""recipe=fastest: what makes a step shorter and leaves AdamW's mathematics as they are.

Numerics: products in bfloat16 by autocast (float16 with loss scaling where a GPU has no bfloat16),
float32 weights, gradients, states and reductions.
"""

from dataclasses import replace

from eke.forecast import Verdict
from eke.published import COMPILED
from eke.recipes.formats import STAYS, half_and_hint
from eke.recipes.ways import computed_again, fused_loss, sparse
from eke.recipes.wish import Ask, Candidate, Recipe, Situation, Wish
from eke.schema import Compute, Packing
from eke.sizes import is_ragged, most_predicted
from eke.units import format_bytes, format_seconds

HOPPER = (9, 0)

LOGITS_BYTES = 2 * 4
"""Of a token and an entry of the vocabulary: a float32 number, and its gradient."""
HEAVY_SHARE = 0.25
"""Of a sample's memory, from which the fused loss is worth its operations: a choice. They were 11.7
of 44.5 GiB of a Llama of 1B parameters in all (docs/lab.md, "recipes that adapt")."""

COMPILE_GAIN = 1 / COMPILED.slowdown
COMPILE_S = 24.5
"""Of a first regional compilation, forward and backward, without a cache: 6 layers of BERT on two
cores (docs/lab.md, "recipes that adapt"); on machines that train it is less."""
EARNED_S = COMPILE_S / (1 - 1 / COMPILE_GAIN)
"""What a run must take without it, so that compilation costs no more than it saves."""

LAUNCHES_PER_LAYER = 116
"""Operations of a BERT layer, forward and backward, under autocast: 2789 in 24 layers
(docs/lab.md, "recipes that adapt")."""
LAUNCH_S = 5e-6
"""The host's time for one: an estimate, the lower end of what PyTorch needs on today's hosts."""

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
    positions = most_predicted(config, (config.batch.per_device or 1) * tokens)
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


def compiler(situation: Situation) -> Wish | None:
    """Regional compilation where the run is long; CUDA graphs where the host is the limit."""
    config, device = situation.config, situation.device
    if device.kind != "cuda":
        return None
    least = least_seconds(situation)
    if least is None:
        return _no_compiler("how long the run takes is not known")
    if is_ragged(situation.config):
        return _no_compiler("each new length would be compiled again")
    if config.model.family == "other":
        return _no_compiler("the layers of this architecture are not known")
    if least < EARNED_S:
        return _no_compiler(
            f"the run takes {format_seconds(least)} at the least, and compiling pays from "
            f"{format_seconds(EARNED_S)} on ({COMPILE_S:g} s saved at a gain of "
            f"{COMPILE_GAIN - 1:.0%}, torchtitan's for a Llama of 8B)"
        )
    earned = (
        f"{COMPILE_GAIN - 1:.0%} faster in torchtitan's Llama of 8B parameters on H100s, and the "
        f"run, {format_seconds(least)} at the least, earns its compilation back"
    )
    if replace(config.compile, option="inductor").replays_graphs:
        return _whole_model(situation, earned)
    regional = Candidate(("compile=inductor", "compile.regional=true"), earned)
    bound = launch_bound(situation)
    if bound is None or not _at_once(situation):
        return Wish(("compile",), (regional,), otherwise=STAYS)
    graphs = Candidate(
        ("compile=inductor", "compile.mode=reduce_overhead"),
        f"{bound}: CUDA graphs launch them at once",
    )
    return Wish(("compile",), (graphs, regional), otherwise=STAYS)


def workers(situation: Situation) -> Wish | None:
    """Batches are made beside the training, where there are cores for it."""
    if situation.device.kind != "cuda" or situation.cores <= WORKERS:
        return None
    why = "batches are made beside the training and copied from page-locked memory"
    decides = ("dataloader", "dataloader.workers")
    return Wish(decides, (Candidate(("dataloader=workers",), why),))


def least_seconds(situation: Situation) -> float | None:
    """What the run takes at the device's peak, for FLOPs or for launches; None: not known."""
    step = _step_seconds(situation)
    return None if step is None else max(step) * situation.plan.steps.total


def launch_bound(situation: Situation) -> str | None:
    """That the host takes longer to launch a step's kernels than the device needs for them."""
    step = _step_seconds(situation)
    if step is None or step[1] <= step[0]:
        return None
    return (
        f"a step's kernels take the host {step[1] * 1e3:.1f} ms to launch (an estimate, "
        f"{LAUNCH_S * 1e6:g} us each), the device {step[0] * 1e3:.1f} ms at its peak"
    )


def _step_seconds(situation: Situation) -> tuple[float, float] | None:
    """Least seconds of an optimizer step in one process: of the device, and of the host."""
    plan, config = situation.plan, situation.config
    peak = situation.device.peak(config.precision.compute.value)
    layers = config.model.num_hidden_layers
    if peak is None or plan.size.flops_per_sample is None or layers is None:
        return None
    samples = plan.batch.samples_per_step / (plan.batch.world_size * plan.batch.devices)
    pieces = plan.batch.accumulation if config.batch.per_device is not None else 1
    return plan.size.flops_per_sample * samples / peak, (
        LAUNCH_S * LAUNCHES_PER_LAYER * layers * pieces
    )


def _no_compiler(why: str) -> Wish:
    return Wish(("compile",), (), otherwise=why)


def _whole_model(situation: Situation, earned: str) -> Wish:
    """With a mode that was typed and replays CUDA graphs, which rules keep from single layers."""
    mode = f"compile.mode={situation.config.compile.mode.value}"
    if not _at_once(situation):
        return _no_compiler(f"{mode} takes all samples of a step at once, which may not fit")
    whole = Candidate(("compile=inductor",), f"{earned}; {mode} takes the whole model")
    return Wish(("compile",), (whole,), otherwise=STAYS)


def _at_once(situation: Situation) -> bool:
    """Whether batch=auto surely takes all samples of a step at once, as CUDA graphs need.

    Of a micro-batch that was typed, the rules say so.
    """
    if situation.config.batch.per_device is not None:
        return True
    found = situation.forecast_whole
    return found is not None and found.verdict is Verdict.fits


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
