"""Techniques of recipes: what saves memory, which 16-bit format pays, whether a run is compiled."""

from dataclasses import replace

from eke.common.text import format_seconds
from eke.config.schema import Horizon, MaskedLM
from eke.estimate.memory import Verdict
from eke.estimate.time import compile_seconds
from eke.hardware import Device
from eke.models.families import family_of
from eke.models.sizes import is_ragged
from eke.rules.techniques import COMPILED, Published, Technique
from eke.tuning.chooser import Axis, RecipeOption, Situation
from eke.tuning.recipes.resolver import Question


def sparse(situation: Situation) -> Question | None:
    """No logits where nothing is to be predicted."""
    config = situation.config
    decides = ("kernels", "kernels.sparse_prediction")
    if isinstance(config.task, MaskedLM):
        why = f"{1 - config.task.mask_frac:.0%} of the positions have no label: no logits for them"
    elif config.task.option == "causal_lm" and getattr(config.data, "prompt", None) is not None:
        why = "a prompt's positions have no label: no logits for them"
    else:
        return None
    return Question(decides, (RecipeOption(("kernels=sparse_prediction",), why),))


def fused_loss(situation: Situation) -> tuple[str, ...]:
    """Its overrides, given the choice made in the same group."""
    if situation.config.kernels.sparse_prediction:
        return "kernels=sparse_prediction", "kernels.fused_linear_cross_entropy=true"
    return ("kernels=fused_linear_cross_entropy",)


def loss(situation: Situation) -> Axis:
    """The vocabulary's projection and the loss as one operation."""
    name = " ".join(fused_loss(situation))
    technique = Technique(name, "logits", "never all logits at once", Published(1.0, ""))
    return Axis(("kernels", "kernels.fused_linear_cross_entropy"), (technique,))


DECIDES = ("precision", "precision.compute", "precision.weights", "precision.float8")

BFLOAT16_CAPABILITY = (8, 0)
FLOAT16_CAPABILITY = (7, 0)
"""First generations with tensor cores for the format: whitepapers in eke.hardware.datasheets."""

FLOAT8_CAPABILITY = (8, 9)
FLOAT8_WIDTH = 2048
"""Narrower layers lose by float8: 0.80 times as fast for a product of 1024 x 2048 x 1024,
https://github.com/pytorch/ao/blob/main/torchao/float8/README.md."""
FLOAT8_HINT = (
    "precision=fp8, other numerics, may be faster: 70.3 instead of 52.3 thousand tokens/s for 1B "
    "parameters on an H100 (llm-foundry, scripts/train/benchmarking)"
)

STAYS = "it stays as it is"

CPU_WIDTH = 256
"""Hidden size from which bfloat16 is taken on a CPU with units for it: a choice. At 64 autocast's
copies cost more than the products save, at 128 it was unsure (docs/lab/recipes.md); at 512 it
was 2.3 times as fast."""


def half(situation: Situation) -> Question:
    """16-bit operands where the device is faster with them."""
    device = situation.device
    if device.kind == "cpu":
        return _on_cpu(situation)
    candidates = []
    if _has(device, "bfloat16", BFLOAT16_CAPABILITY):
        candidates.append(RecipeOption(("precision=bf16",), _gain(situation, "bfloat16")))
    if _has(device, "float16", FLOAT16_CAPABILITY):
        why = _gain(situation, "float16")
        if not candidates:
            why += ", and it has no units for bfloat16"
        candidates.append(RecipeOption(("precision=fp16",), why))
    slow = f"{device.name} has no tensor cores: 16 bits would be no faster"
    return Question(DECIDES, tuple(candidates), otherwise=slow)


def _on_cpu(situation: Situation) -> Question:
    name, units = situation.device.name, situation.bfloat16_units
    width = situation.config.model.hidden_size or 0
    if not units:
        return Question(DECIDES, (), otherwise=f"{name} has no units for bfloat16 (/proc/cpuinfo)")
    flags = ", ".join(units)
    if width < CPU_WIDTH:
        why = f"{name} has {flags}, and a model {width} wide is too narrow to gain by them"
        return Question(DECIDES, (), otherwise=f"{why}, below {CPU_WIDTH} (docs/lab/recipes.md)")
    why = f"{name} multiplies bfloat16 in units of its own ({flags})"
    return Question(DECIDES, (RecipeOption(("precision=bf16",), why),), otherwise=STAYS)


def _has(device: Device, dtype: str, since: tuple[int, int]) -> bool:
    """By the datasheet; of a device without one by its generation."""
    if device.peak_flops:
        return device.peak(dtype) is not None
    return (device.capability or (0, 0)) >= since


def _gain(situation: Situation, dtype: str) -> str:
    """How much faster, with both numbers."""
    device = situation.device
    narrow, wide = device.peak(dtype), device.peak("float32")
    if narrow is None or wide is None:
        return f"{device.name} has tensor cores for {dtype}; its peaks are not known"
    peaks = f"{narrow / 1e12:.4g} and {wide / 1e12:.4g} TFLOP/s by the datasheet"
    faster = f"{narrow / wide:.1f} times as fast as float32"
    return f"{device.name} multiplies {dtype} matrices {faster} ({peaks})"


def half_and_hint(situation: Situation) -> Question:
    """The same, and where float8 may be faster still, a word about it: numerics of another kind."""
    question, device, config = half(situation), situation.device, situation.config
    is_fast = device.kind == "cuda" and (device.capability or (0, 0)) >= FLOAT8_CAPABILITY
    is_wide = (config.model.hidden_size or 0) >= FLOAT8_WIDTH
    if not (is_fast and is_wide) or config.peft.option != "none":  # measured where all is trained
        return question
    hinted = tuple(replace(c, reason=f"{c.reason}; {FLOAT8_HINT}") for c in question.candidates)
    return replace(question, candidates=hinted)


REGIONAL = ("compile=inductor", "compile.regional=true")

COMPILE_GAIN = 1 / COMPILED.slowdown
"""The speed of compiled layers over that of the others."""

LAUNCHES_PER_LAYER = 116
"""Of BERT, forward and backward, under autocast: 2789 in 24 layers (docs/lab/recipes.md)."""
LAUNCH_S = 5e-6
"""The host's time for one: an estimate, the lower end of what PyTorch needs on today's hosts."""


def compiler(situation: Situation) -> Question | None:
    """Regional compilation where the run is long; CUDA graphs where the host is the limit."""
    if situation.device.kind != "cuda":
        return None
    config, least = situation.config, least_seconds(situation)
    # An explicit mode that replays CUDA graphs, which rules keep from single layers.
    whole = replace(config.compile, option="inductor").replays_graphs
    why_not = _why_uncompiled(situation, least, whole)
    if why_not:
        return Question(("compile",), (), otherwise=why_not)
    earned = f"{COMPILE_GAIN - 1:.0%} faster in torchtitan's Llama of 8B parameters on H100s, and "
    if config.recipe.horizon is Horizon.steady or least is None:
        earned += "recipe.horizon=steady leaves out what compilation takes"
    else:
        earned += f"the run, {format_seconds(max(least))} at the least, earns its compilation back"
    if whole:
        earned += f"; compile.mode={config.compile.mode.value} takes the whole model"
    options = [RecipeOption(("compile=inductor",) if whole else REGIONAL, earned)]
    device_s, host_s = least or (0.0, 0.0)
    # Graphs save the host's time beyond the device's, and compile the whole model.
    if not whole and host_s - device_s > spent(situation, regional=False) and _at_once(situation):
        steps = situation.plan.steps.total
        why = (
            f"a step's kernels take the host {host_s / steps * 1e3:.1f} ms to launch (an estimate, "
            f"{LAUNCH_S * 1e6:g} us each), the device {device_s / steps * 1e3:.1f} ms at its peak: "
            "CUDA graphs launch them at once"
        )
        options.insert(0, RecipeOption(("compile=inductor", "compile.mode=reduce_overhead"), why))
    return Question(("compile",), tuple(options), otherwise=STAYS)


def least_seconds(situation: Situation) -> tuple[float, float] | None:
    """Seconds of all FLOPs at the device's peak, and of all launches by the host, if known."""
    plan, config = situation.plan, situation.config
    peak = situation.device.peak(config.precision.compute.value)
    layers = config.model.num_hidden_layers
    if peak is None or plan.size.flops_per_sample is None or layers is None:
        return None
    steps = plan.steps.total
    samples = plan.batch.samples_per_step / (plan.batch.world_size * plan.batch.devices)
    pieces = plan.batch.accumulation if config.batch.per_device is not None else 1
    device_s = steps * plan.size.flops_per_sample * samples / peak
    return device_s, steps * LAUNCH_S * LAUNCHES_PER_LAYER * layers * pieces


def spent(situation: Situation, *, regional: bool) -> float:
    """Seconds of compilation that have to pay: of the whole run, or none."""
    if situation.config.recipe.horizon is Horizon.steady:
        return 0.0
    how = replace(situation.config.compile, option="inductor", regional=regional)
    config = replace(situation.config, compile=how)
    return compile_seconds(replace(situation.plan, config=config))


def _why_uncompiled(situation: Situation, least: tuple[float, float] | None, whole: bool) -> str:
    """Why the run is not compiled; empty where it is."""
    if least is None and situation.config.recipe.horizon is not Horizon.steady:
        return "how long the run takes is not known"
    if is_ragged(situation.config):
        return "each new length would be compiled again"
    if not family_of(situation.config).is_known:
        return "the layers of this architecture are not known"
    seconds, saved = spent(situation, regional=not whole), 1 - 1 / COMPILE_GAIN
    if least is not None and max(least) * saved < seconds:
        return (
            f"the run takes {format_seconds(max(least))} at the least, and compiling pays from "
            f"{format_seconds(seconds / saved)} on ({seconds:.2g} s saved at a gain of "
            f"{COMPILE_GAIN - 1:.0%}, torchtitan's for a Llama of 8B)"
        )
    if whole and not _at_once(situation):
        mode = situation.config.compile.mode.value
        return f"compile.mode={mode} takes all samples of a step at once, which may not fit"
    return ""


def _at_once(situation: Situation) -> bool:
    """Whether batch=auto surely takes all samples of a step at once, as CUDA graphs need."""
    if situation.config.batch.per_device is not None:
        return True  # the rules report it
    found = situation.forecast_whole
    return found is not None and found.verdict is Verdict.fits
