"""Techniques whose effect on moved bytes and launches is only known as a range."""

import math
from dataclasses import dataclass

from eke.common.text import format_seconds
from eke.config.schema import Mix, OptimizeFor, Rows, Synthetic
from eke.estimate.memory.components import shape_of, uncertainty_reasons
from eke.estimate.time.rates import Span, exact_span, network_of
from eke.models.families import Shape
from eke.models.sizes import optimizer_entry
from eke.plan.planner import Plan

_COMPILED_MOVED = Span(0.33, 0.6, 1.0)
"""Bytes of compiled passes relative to eager ones: an assumption consistent with the gain of steps,
1.16 for Llama-8B (torchtitan, benchmarks/llama3_h100_202412_torchtitan.md), 1.85 for nanoGPT."""

_COMPILED_LAUNCHES = Span(0.25, 0.34, 0.54)
"""Launches of compiled passes relative to eager ones: 6.3 of 18.3 ms for Llama-1B (Accelerate,
benchmarks/torch.compile/README.md), 135 of 250 ms for nanoGPT. Low: a quarter, an assumption."""

_GRAPH_LAUNCHES = Span(0.01, 0.1, 0.34)
"""Host time with CUDA graphs relative to eager launches: an assumption, at most as compiled."""

_LIGER = Span(0.4, 0.75, 1.0)
"""Bytes and launches with Liger's kernels, from steps a fifth faster (linkedin/Liger-Kernel README)
to no gain (its issue 236, a Phi-3 on one A100)."""


def factors_of(plan: Plan) -> tuple[Span, Span]:
    """Return the factors of compilation and fused kernels on moved bytes and on launches."""
    config = plan.config
    moved = launches = exact_span(1.0)
    if config.compile.is_inductor:
        moved, launches = _COMPILED_MOVED, _COMPILED_LAUNCHES
    if config.compile.replays_graphs:
        launches = _GRAPH_LAUNCHES
    if config.kernels.is_liger:
        moved, launches = moved.by(_LIGER), launches.by(_LIGER)
    return moved, launches


_NOTES = {
    "architecture": "no counts for this architecture: estimated as a Llama of its size",
    "compiler": "the effect of torch.compile's fusion is known as a range",
    "fused_kernels": "the effect of fused kernels is known as a range",
    "lengths": "samples differ in length: their mean over a training is used",
    "data_parallel": "distributed=dp: one Python process serves all devices in sequence",
    "adapters": "adapters: their operations are counted per layer, not one by one",
    "experts": "experts: the router is assumed to balance tokens",
    "float8": "float8: 0.8 to 1.35 times the speed of 16 bits, as published",
    "ds_config": "a user's ds_config.json may move or share anything",
}
"""Clause about the step time, by doubt of the memory forecast."""


def notes_of(plan: Plan, shape: Shape) -> tuple[str, ...]:
    """Return the effects that are not modelled, or only as a range, one clause each."""
    config, doubts = plan.config, uncertainty_reasons(plan)
    data = config.data
    found = [text for doubt, text in _NOTES.items() if doubt in doubts]
    if config.kernels.fused_linear_cross_entropy:
        found.append("the fused loss: its logits are counted as if not split")
    if config.kernels.sparse_prediction and shape.predicted == 1:
        found.append("sparse prediction: every position is counted as labelled")
    if config.offload.is_on:
        found.append("the speed of the host's CPU, and of a disk, is known as a wide range")
    if config.memory.empty_cache_every is not None:
        found.append("releasing cached memory: about a tenth of a step each time (transformers)")
    if isinstance(data, Rows | Mix) and config.dataloader.workers == 0:
        found.append("rows are read in the training process: that time is excluded")
    if not isinstance(data, Synthetic) and getattr(data, "streaming", False):
        found.append("a stream may be slower than the device")
    if seconds := compile_seconds(plan):
        took = format_seconds(seconds)
        found.append(f"compiling takes about {took} once, less with an earlier run's cached code")
    if not_timed := optimizer_entry(config.optimizer).not_timed:
        found.append(not_timed)
    if plan.ranks.num_nodes > 1:
        rate, why = network_of(plan)
        found.append(f"network of each node: {rate * 8e-9:g} Gbit/s, {why}")
    return tuple(found)


@dataclass(frozen=True)
class _Compiler:
    """Seconds of compilation without a cache."""

    whole: float
    """Seconds for any model."""
    layer: float
    """Seconds per layer if the entire model is compiled."""
    regional: float
    """Seconds of a layer compiled for all. An encoder-decoder has two."""


_GPU = _Compiler(whole=10.0, layer=1.2, regional=13.0)
"""Per layer of entire models: twice the forward passes in Accelerate's
benchmarks/torch.compile/README.md (10.7 s for the 16 layers of a Llama 1B, 20.4 s for the 32 of
8B), since backward passes are also compiled. By regions, 13 s for a Llama 1B, 22 s for 8B with LoRA
(H100, no cache: notes/lab/gpu.md). The base of entire models is an assumption."""

_CPU = _Compiler(whole=2.0, layer=6.5, regional=28.0)
"""Two cores and g++: BERT with six layers 42.8 s, by regions 24.5 s. `model=tiny`, with four,
22.9 s and 35.8 s (notes/lab/recipes.md)."""


def steps_to_pay(plan: Plan) -> float:
    """Return the steps over which compilation must pay off: the run's, or inf in steady state."""
    steady = plan.config.recipe.horizon is OptimizeFor.steady
    return math.inf if steady else plan.steps.total


def compile_seconds(plan: Plan) -> float:
    """Return the expected seconds of compilation, once per run, within a factor of two."""
    config = plan.config.compile
    if not config.is_inductor:
        return 0.0
    compiler = _GPU if plan.device.kind == "cuda" else _CPU
    shape = shape_of(plan)
    if config.regional:
        return compiler.regional * (2 if shape.decoder_layers else 1)
    return compiler.whole + compiler.layer * (shape.layers + shape.decoder_layers)
