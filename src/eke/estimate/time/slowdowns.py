"""Techniques that change what passes move and launch by factors that are only known as ranges."""

import math
from dataclasses import dataclass

from eke.common.text import format_seconds
from eke.config.schema import Horizon, Mix, Rows, Synthetic
from eke.estimate.memory.components import doubts_of, shape_of
from eke.estimate.time.rates import Span, exactly, network_of
from eke.models.families import Shape
from eke.models.sizes import optimizer_entry
from eke.plan.planner import Plan

COMPILED_MOVED = Span(0.33, 0.6, 1.0)
"""Bytes of compiled passes over eager ones: element-wise operations in a row become one kernel. An
assumption within what whole steps gained: 1.16 for Llama-8B (torchtitan,
benchmarks/llama3_h100_202412_torchtitan.md), 1.85 for nanoGPT (karpathy/nanoGPT README)."""

COMPILED_LAUNCHES = Span(0.25, 0.34, 0.54)
"""Launches of compiled passes: Llama-1B's launch-bound forward pass took 6.3 in place of 18.3 ms
(Accelerate, benchmarks/torch.compile/README.md); nanoGPT's step 135 in place of 250 ms is the high
end, a quarter, an assumption, the low one."""

GRAPH_LAUNCHES = Span(0.01, 0.1, 0.34)
"""Host time where CUDA graphs are replayed: an assumption; the high end is a compiled model's."""

LIGER = Span(0.4, 0.75, 1.0)
"""Bytes and launches with Liger's kernels: from a fifth faster steps (linkedin/Liger-Kernel README)
to none (its issue 236, a Phi-3 on one A100)."""


def factors_of(plan: Plan) -> tuple[Span, Span]:
    """Of compilation and fused kernels, on bytes that passes move and on their launches."""
    config = plan.config
    moved = launches = exactly(1.0)
    if config.compile.option == "inductor":
        moved, launches = COMPILED_MOVED, COMPILED_LAUNCHES
    if config.compile.replays_graphs:
        launches = GRAPH_LAUNCHES
    if config.kernels.option == "liger":
        moved, launches = moved.by(LIGER), launches.by(LIGER)
    return moved, launches


NOTES = {
    "architecture": "no counts for this architecture: a Llama of its sizes stands in",
    "compiler": "what torch.compile fuses is known as a range",
    "fused_kernels": "what fused kernels save is known as a range",
    "lengths": "samples differ in length: their mean over a training is counted",
    "data_parallel": "distributed=dp: one Python process feeds all devices, one after the other",
    "adapters": "adapters: their own operations are counted by layers, not one by one",
    "experts": "experts: as if the router sent each as many tokens",
    "float8": "float8: 0.8 to 1.35 times the speed of 16 bits, as published",
    "ds_config": "a ds_config.json of one's own may move or share anything",
}
"""Doubt of the memory forecast -> the clause for the step time."""


def notes_of(plan: Plan, shape: Shape) -> tuple[str, ...]:
    """What is not modelled, or only as a range, one clause each."""
    config, doubts = plan.config, doubts_of(plan)
    data = config.data
    found = [text for doubt, text in NOTES.items() if doubt in doubts]
    if config.kernels.fused_linear_cross_entropy:
        found.append("the fused loss: its logits are counted as if they were whole")
    if config.kernels.sparse_prediction and shape.predicted == 1:
        found.append("sparse prediction: as if every position had a label; the data may differ")
    if config.offload.option != "none":
        found.append("the host's processor, and a disk, are known as wide ranges")
    if config.memory.empty_cache_every is not None:
        found.append("giving cached memory back: about a tenth of a step each time (transformers)")
    if isinstance(data, Rows | Mix) and config.dataloader.workers == 0:
        found.append("rows are read in the training process: that time is not included")
    if not isinstance(data, Synthetic) and getattr(data, "streaming", False):
        found.append("a stream may be slower than the device")
    if seconds := compile_seconds(plan):
        took = format_seconds(seconds)
        found.append(f"compiling, about {took} once, less where an earlier run left the same code")
    if not_timed := optimizer_entry(config.optimizer).not_timed:
        found.append(not_timed)
    if config.distributed.num_nodes > 1:
        rate, why = network_of(plan)
        found.append(f"network of each machine: {rate * 8e-9:g} Gbit/s, {why}")
    return tuple(found)


@dataclass(frozen=True)
class _Compiler:
    """Seconds without any cache."""

    whole: float
    """Whatever the model."""
    layer: float
    """Of each layer, where the whole model is compiled."""
    regional: float
    """Where one layer is compiled for all; a decoder's alongside an encoder's as well."""


GPU = _Compiler(whole=10.0, layer=1.2, regional=13.0)
"""Layers of whole models: twice what Accelerate's benchmarks/torch.compile/README.md found for
forward passes alone, as a backward pass is compiled as well: 10.7 s for the 16 layers of a Llama of
1B, 20.4 for the 32 of one of 8B. By regions 13 s of a Llama of 1B, 22 of one of 8B with LoRA (H100,
no cache: docs/lab/gpu.md); the base of whole models is an assumption."""

CPU = _Compiler(whole=2.0, layer=6.5, regional=28.0)
"""Two cores and g++: BERT of six layers 42.8 s, by regions 24.5; `model=tiny`, of four, 22.9 and
35.8 (docs/lab/recipes.md)."""


def steps_to_pay(plan: Plan) -> float:
    """Optimizer steps over which compilation is paid: the run's; without end in steady state."""
    steady = plan.config.recipe.horizon is Horizon.steady
    return math.inf if steady else plan.steps.total


def compile_seconds(plan: Plan) -> float:
    """Wall seconds expected in the compiler, once per run, within a factor of two."""
    config = plan.config.compile
    if config.option != "inductor":
        return 0.0
    compiler = GPU if plan.device.kind == "cuda" else CPU
    shape = shape_of(plan)
    if config.regional:
        return compiler.regional * (2 if shape.decoder_layers else 1)
    return compiler.whole + compiler.layer * (shape.layers + shape.decoder_layers)
