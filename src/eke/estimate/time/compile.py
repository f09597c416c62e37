"""How long TorchInductor takes before the first step: a first guess, within a factor of two."""

from dataclasses import dataclass

from eke.estimate.memory.shape import shape_of
from eke.plan.planner import Plan


@dataclass(frozen=True)
class _Compiler:
    """Seconds without any cache."""

    whole: float
    """Whatever the model."""
    layer: float
    """Of each layer, where the whole model is compiled."""
    regional: float
    """Where one layer is compiled for all."""


GPU = _Compiler(whole=2.0, layer=1.2, regional=5.0)
"""Twice what Accelerate's benchmarks/torch.compile/README.md found for forward passes alone, as a
backward pass is compiled as well: 10.7 s for the 16 layers of a Llama of 1B, 20.4 for the 32 of one
of 8B, 1.95 and 2.9 by regions."""

CPU = _Compiler(whole=2.0, layer=6.5, regional=28.0)
"""Two cores and g++: BERT of six layers 42.8 s, by regions 24.5; `model=tiny`, of four, 22.9 and
35.8 (docs/lab.md)."""


def compile_seconds(plan: Plan) -> float:
    """Wall seconds that are expected inside the compiler, once per run; 0 without TorchInductor."""
    config = plan.config.compile
    if config.option != "inductor":
        return 0.0
    compiler = GPU if plan.device.kind == "cuda" else CPU
    if config.regional:
        return compiler.regional
    shape = shape_of(plan)
    return compiler.whole + compiler.layer * (shape.layers + shape.decoder_layers)
