"""torch.compile, and what the compiler did.

All runs of a user on a machine share what is compiled (`eke.training.loop.compiled_code`).
"""

from typing import Any, cast

import torch

from eke.common.errors import RunError
from eke.config.schema import CompileMode
from eke.plan.planner import Plan
from eke.training.model.checkpointing import find_layers

BACKENDS: dict[str, str | None] = {
    "none": None,
    "inductor": "inductor",
    "aot_eager": "aot_eager",
    "eager": "eager",
    "cudagraphs": "cudagraphs",
}
"""Option of the group `compile` -> torch.compile's backend; None does not compile."""

MAX_COMPILATIONS = 4096
"""Compilations that are remembered for the report; far above what a usable run has."""


VARIANTS_OF_LAYERS = 32
"""Versions of one layer's code that regional compilation may keep: T5 has four kinds of layer
(encoder's and decoder's, the first of each with position biases), each is trained and evaluated,
and lengths become dynamic with the second that is met. At PyTorch's 8 it would silently run the
rest operation by operation."""


def compile_model(plan: Plan, model: torch.nn.Module) -> torch.nn.Module:
    """The model, wrapped for compilation at its first call, or itself when nothing is compiled.

    With `compile.regional` it is itself, and its layers compile when they are first called; layers
    of one class share their code. Starts from an empty compiler: earlier graphs of this process and
    the counters of `compile_report` are dropped.

    Raises:
        RunError: layers are to be compiled, and the model has none.
    """
    config = plan.config.compile
    arguments: dict[str, Any] = {"backend": BACKENDS[config.option]}
    if arguments["backend"] is None:
        return model
    if arguments["backend"] == "inductor" and config.mode is not CompileMode.default:
        arguments["mode"] = config.mode.value.replace("_", "-")
    _reset()
    if not config.regional:
        return cast(torch.nn.Module, torch.compile(model, **arguments))
    layers = find_layers(model)
    if not layers:
        raise RunError(
            f"compile.regional = true: {type(model).__name__} has no layers that transformers "
            "marks as repeated\n  -> compile.regional=false"
        )
    torch._dynamo.config.recompile_limit = VARIANTS_OF_LAYERS
    for layer in layers:
        layer.compile(**arguments)
    return model


def is_compiled(plan: Plan) -> bool:
    """Whether torch.compile has anything to do."""
    return BACKENDS[plan.config.compile.option] is not None


def num_graphs(plan: Plan) -> int:
    """Graphs captured so far: more after a step in which the compiler ran."""
    if not is_compiled(plan):
        return 0
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def compile_report() -> dict[str, Any]:
    """What the compiler has done in this process since `compile_model`.

    Returns:
        `graphs`: graphs captured by Dynamo, those of recompilations included; `operations`: in
        them; `graph_breaks`: times it had to end a graph early; `recompiles`: compilations because
        a guard failed, a new shape say; `cache_hits`, `cache_misses`: graphs that inductor had, and
        had not, compiled for an earlier run; `compile_s`: wall seconds inside the compiler, backend
        included: Dynamo's own duration of each frame and of each backward graph compiled when first
        needed.
    """
    from torch._dynamo.utils import counters, get_compilation_metrics

    metrics = get_compilation_metrics()
    return {
        "graphs": int(counters["stats"]["unique_graphs"]),
        "operations": sum(m.graph_op_count or 0 for m in metrics),
        "graph_breaks": sum(counters["graph_break"].values()),
        "recompiles": sum(m.recompile_reason is not None for m in metrics),
        "cache_hits": int(counters["inductor"]["fxgraph_cache_hit"]),
        "cache_misses": int(counters["inductor"]["fxgraph_cache_miss"]),
        "compile_s": sum(m.duration_us or 0 for m in metrics) / 1e6,
    }


def _reset() -> None:
    """Drop compiled code, counters and the history of compilations of this process."""
    from torch._dynamo.utils import (
        clear_compilation_metrics,
        counters,
        set_compilation_metrics_limit,
    )

    torch._dynamo.reset()
    counters.clear()
    # Dynamo keeps the last 64 by default; a run with many graph breaks would lose its first ones.
    set_compilation_metrics_limit(MAX_COMPILATIONS)
    clear_compilation_metrics()
