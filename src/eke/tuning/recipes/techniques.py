"""Techniques of recipes: memory savings, 16-bit formats and compilation."""

from dataclasses import replace

from eke.common.text import format_seconds
from eke.config.schema import OptimizeFor
from eke.estimate.memory import Verdict
from eke.estimate.time import compile_seconds
from eke.hardware import Device
from eke.models.families import family_of
from eke.models.sizes import is_ragged
from eke.rules.techniques import COMPILED, Published, Technique
from eke.tuning.recipe_search import Axis, ChoiceContext, RecipeOption
from eke.tuning.recipes.resolver import Question


def sparse(situation: ChoiceContext) -> Question | None:
    """Skip the logits of positions without a label, if there are any."""
    config = situation.config
    decides = ("kernels", "kernels.sparse_prediction")
    if share := config.targets.mask_frac:
        why = f"{1 - share:.0%} of the positions have no label and need no logits"
    elif config.targets.is_causal and getattr(config.data, "prompt", None) is not None:
        why = "a prompt's positions have no label and need no logits"
    else:
        return None
    return Question(decides, (RecipeOption(("kernels=sparse_prediction",), why),))


def fused_loss(situation: ChoiceContext) -> tuple[str, ...]:
    """Return the overrides of the fused loss, given the option chosen in its group."""
    if situation.config.kernels.sparse_prediction:
        return "kernels=sparse_prediction", "kernels.fused_linear_cross_entropy=true"
    return ("kernels=fused_linear_cross_entropy",)


def loss(situation: ChoiceContext) -> Axis:
    """Return the axis of the fused loss: projection and loss as one operation."""
    name = " ".join(fused_loss(situation))
    technique = Technique(name, "logits", "never holds all logits at once", Published(1.0, ""))
    return Axis(("kernels", "kernels.fused_linear_cross_entropy"), (technique,))


DECIDES = ("precision", "precision.compute", "precision.weights", "precision.float8")

_BFLOAT16_CAPABILITY = (8, 0)
_FLOAT16_CAPABILITY = (7, 0)
"""Least compute capability with tensor cores for the format (see eke.hardware.datasheets)."""

_FLOAT8_CAPABILITY = (8, 9)
_FLOAT8_WIDTH = 2048
"""Least hidden size for float8. Narrower layers lose: 0.80 times as fast for a product of
1024 x 2048 x 1024, https://github.com/pytorch/ao/blob/main/torchao/float8/README.md."""
_FLOAT8_HINT = (
    "precision=fp8 may be faster, with other numerics: 70.3 instead of 52.3 thousand tokens/s for "
    "1B parameters on an H100 (llm-foundry, scripts/train/benchmarking)"
)

STAYS = "unchanged"

_CPU_WIDTH = 256
"""Least hidden size for bfloat16 on a CPU with units for it: a choice. At 64, autocast's copies
cost more than the products save. At 128, the effect was not significant (notes/lab/recipes.md). At
512, it was 2.3 times as fast."""


def choose_16_bit(situation: ChoiceContext) -> Question:
    """Choose the 16-bit format in which the device is faster than in float32."""
    device = situation.device
    if device.kind == "cpu":
        return _on_cpu(situation)
    candidates = []
    if _is_fast_in(device, "bfloat16", _BFLOAT16_CAPABILITY):
        candidates.append(RecipeOption(("precision=bf16",), _gain(situation, "bfloat16")))
    if _is_fast_in(device, "float16", _FLOAT16_CAPABILITY):
        why = _gain(situation, "float16")
        if not candidates:
            why += ", without units for bfloat16"
        candidates.append(RecipeOption(("precision=fp16",), why))
    slow = f"{device.name} has no tensor cores: 16 bits would be no faster"
    return Question(DECIDES, tuple(candidates), otherwise=slow)


def _on_cpu(situation: ChoiceContext) -> Question:
    name, units = situation.device.name, situation.bfloat16_units
    width = situation.config.model.hidden_size or 0
    if not units:
        return Question(DECIDES, (), otherwise=f"{name} has no units for bfloat16 (/proc/cpuinfo)")
    flags = ", ".join(units)
    if width < _CPU_WIDTH:
        why = f"{name} has {flags}, but a model {width} wide is too narrow to gain"
        return Question(DECIDES, (), otherwise=f"{why} (below {_CPU_WIDTH}, notes/lab/recipes.md)")
    why = f"{name} has units for bfloat16 ({flags})"
    return Question(DECIDES, (RecipeOption(("precision=bf16",), why),), otherwise=STAYS)


def _is_fast_in(device: Device, dtype: str, since: tuple[int, int]) -> bool:
    """Return whether a device is fast in a format, by its datasheet, else by its generation."""
    if device.peak_flops:
        return device.peak(dtype) is not None
    return (device.capability or (0, 0)) >= since


def _gain(situation: ChoiceContext, dtype: str) -> str:
    device = situation.device
    narrow, wide = device.peak(dtype), device.peak("float32")
    if narrow is None or wide is None:
        return f"{device.name} has tensor cores for {dtype} (peak rates unknown)"
    peaks = f"{narrow / 1e12:.4g} and {wide / 1e12:.4g} TFLOP/s by the datasheet"
    faster = f"{narrow / wide:.1f} times as fast as float32"
    return f"{device.name} multiplies {dtype} matrices {faster} ({peaks})"


def choose_16_bit_with_hint(situation: ChoiceContext) -> Question:
    """Return the question of `choose_16_bit`, with a hint at float8 if it may be faster."""
    question, device, config = choose_16_bit(situation), situation.device, situation.config
    is_fast = device.kind == "cuda" and (device.capability or (0, 0)) >= _FLOAT8_CAPABILITY
    is_wide = (config.model.hidden_size or 0) >= _FLOAT8_WIDTH
    if not (is_fast and is_wide) or config.peft.is_on:  # published for full training
        return question
    hinted = tuple(replace(c, reason=f"{c.reason}. {_FLOAT8_HINT}") for c in question.candidates)
    return replace(question, candidates=hinted)


REGIONAL = ("compile=inductor", "compile.regional=true")

COMPILE_GAIN = 1 / COMPILED.slowdown
"""Speed of compiled layers relative to eager layers."""

LAUNCHES_PER_LAYER = 116
"""Kernel launches of a BERT layer under autocast: 2789 for 24 layers (notes/lab/recipes.md)."""
HOST_LAUNCH_S = 5e-6
"""Host time of one launch in seconds: an estimate, the lower end for PyTorch on current hosts."""


def compiler(situation: ChoiceContext) -> Question | None:
    """Choose regional compilation for long runs, or CUDA graphs if the host limits the speed."""
    if situation.device.kind != "cuda":
        return None
    config, least = situation.config, _least_seconds(situation)
    # An explicit mode with CUDA graphs: rules reject it for single layers.
    whole = replace(config.compile, option="inductor").replays_graphs
    why_not = _why_uncompiled(situation, least, whole)
    if why_not:
        return Question(("compile",), (), otherwise=why_not)
    earned = f"{COMPILE_GAIN - 1:.0%} faster for torchtitan's Llama 8B on H100s. "
    if config.recipe.horizon is OptimizeFor.steady or least is None:
        earned += "recipe.horizon=steady ignores the time of compilation"
    else:
        earned += f"Compiling pays off in a run of at least {format_seconds(max(least))}"
    if whole:
        earned += f". compile.mode={config.compile.mode.value} compiles the entire model"
    options = [RecipeOption(("compile=inductor",) if whole else REGIONAL, earned)]
    device_s, host_s = least or (0.0, 0.0)
    # CUDA graphs save the host time beyond the device time, and compile the entire model.
    if (
        not whole
        and host_s - device_s > _compile_overhead_s(situation, regional=False)
        and _fits_at_once(situation)
    ):
        steps = situation.plan.steps.total
        why = (
            f"a step's kernels take the host {host_s / steps * 1e3:.1f} ms to launch (estimate, "
            f"{HOST_LAUNCH_S * 1e6:g} us each), the device {device_s / steps * 1e3:.1f} ms at its "
            "peak. CUDA graphs launch them at once"
        )
        options.insert(0, RecipeOption(("compile=inductor", "compile.mode=reduce_overhead"), why))
    return Question(("compile",), tuple(options), otherwise=STAYS)


def _least_seconds(situation: ChoiceContext) -> tuple[float, float] | None:
    """Return the seconds of all FLOPs at the device's peak and of all launches, None if unknown."""
    plan, config = situation.plan, situation.config
    peak = situation.device.peak(config.precision.compute.value)
    layers = config.model.num_hidden_layers
    if peak is None or plan.size.flops_per_sample is None or layers is None:
        return None
    steps = plan.steps.total
    samples = plan.batch.samples_per_step / (plan.batch.world_size * plan.batch.devices)
    pieces = plan.batch.accumulation if config.batch.per_device is not None else 1
    device_s = steps * plan.size.flops_per_sample * samples / peak
    return device_s, steps * HOST_LAUNCH_S * LAUNCHES_PER_LAYER * layers * pieces


def _compile_overhead_s(situation: ChoiceContext, *, regional: bool) -> float:
    """Return the seconds of compilation that must pay off, 0 for a steady horizon."""
    if situation.config.recipe.horizon is OptimizeFor.steady:
        return 0.0
    how = replace(situation.config.compile, option="inductor", regional=regional)
    config = replace(situation.config, compile=how)
    return compile_seconds(replace(situation.plan, config=config))


def _why_uncompiled(
    situation: ChoiceContext, least: tuple[float, float] | None, whole: bool
) -> str:
    """Return why the run is not compiled, "" if it is."""
    if least is None and situation.config.recipe.horizon is not OptimizeFor.steady:
        return "the run's duration is unknown"
    if is_ragged(situation.config):
        return "each new sequence length would be compiled again"
    if not family_of(situation.config).is_known:
        return "the layers of this architecture are unknown"
    seconds, saved = _compile_overhead_s(situation, regional=not whole), 1 - 1 / COMPILE_GAIN
    if least is not None and max(least) * saved < seconds:
        return (
            f"the run takes at least {format_seconds(max(least))}, and compiling pays from "
            f"{format_seconds(seconds / saved)} on ({seconds:.2g} s saved at a gain of "
            f"{COMPILE_GAIN - 1:.0%}, torchtitan's for Llama 8B)"
        )
    if whole and not _fits_at_once(situation):
        mode = situation.config.compile.mode.value
        return f"compile.mode={mode} needs all samples of a step at once, which may not fit"
    return ""


def _fits_at_once(situation: ChoiceContext) -> bool:
    """Return whether all samples of a step surely fit at once, as CUDA graphs need."""
    if situation.config.batch.per_device is not None:
        return True  # checked by rules
    found = situation.forecast_whole
    return found is not None and found.verdict is Verdict.fits
