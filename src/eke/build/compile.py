"""torch.compile, and what the compiler did."""

from typing import Any, cast

import torch

from eke.plan import Plan

BACKENDS: dict[str, str | None] = {
    "none": None,
    "inductor": "inductor",
    "aot_eager": "aot_eager",
    "eager": "eager",
}
"""Option of the group `compile` -> torch.compile's backend; None does not compile."""

MAX_COMPILATIONS = 4096
"""Compilations that are remembered for the report; far above what a usable run has."""


def compile_model(plan: Plan, model: torch.nn.Module) -> torch.nn.Module:
    """The model, wrapped for compilation at its first call, or itself when nothing is compiled.

    Starts from an empty compiler: earlier graphs of this process and the counters of
    `compile_report` are dropped. `unwrap` gives the model back, whose `state_dict` has the
    uncompiled names.
    """
    backend = BACKENDS[plan.config.compile.option]
    if backend is None:
        return model
    _reset()
    return cast(torch.nn.Module, torch.compile(model, backend=backend))


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside a compiled wrapper, or the model itself: for names, saving and layers."""
    return cast(torch.nn.Module, getattr(model, "_orig_mod", model))


def num_graphs(plan: Plan) -> int:
    """Graphs captured so far: more after a step in which the compiler ran."""
    if BACKENDS[plan.config.compile.option] is None:
        return 0
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def compile_report() -> dict[str, Any]:
    """What the compiler has done in this process since `compile_model`.

    Returns:
        `graphs`: graphs captured by Dynamo, those of recompilations included; `graph_breaks`: times
        it had to end a graph early; `recompiles`: compilations because a guard failed, a new shape
        say; `compile_s`: wall seconds inside the compiler, backend included: Dynamo's own
        duration of each frame and of each backward graph compiled when first needed.
    """
    from torch._dynamo.utils import counters, get_compilation_metrics

    metrics = get_compilation_metrics()
    return {
        "graphs": int(counters["stats"]["unique_graphs"]),
        "graph_breaks": sum(counters["graph_break"].values()),
        "recompiles": sum(m.recompile_reason is not None for m in metrics),
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
