"""What planning a sweep costs before its first run starts: composed, checked, planned.

python benchmarks/sweep_planning.py [results/sweep_planning.json]

Seconds of processor time, so that other users of the machine do not count; wall time beside it.
`hydra` is one composition by Hydra alone, for every cell, as before.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

from arguments import writable
from provenance import machine, provenance

from eke.config.compose import compose
from eke.config.sweep import expand
from eke.workflows.sweep import plan_cells

SWEEPS = {
    # One option combination, a thousand values: the cheapest kind.
    "values": ["optimizer.lr=range(1,1001)"],
    # 250 combinations of options, the dearest kind that people type.
    "options": [
        "optimizer=adamw,adamw_foreach,adamw_forloop,adafactor,sgd",
        "memory=none,checkpointing,empty_cache,activation_offload,checkpointing_selective",
        "precision=fp32,bf16",
        "schedule=cosine,linear,constant,wsd,cosine",
        "seed=range(0,4)",
    ],
}


def timed(work: Callable[[], object]) -> tuple[object, dict[str, float]]:
    """The answer, and what it cost."""
    cpu, wall = time.process_time(), time.perf_counter()
    answer = work()
    cost = {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}
    return answer, {name: round(value, 3) for name, value in cost.items()}


def measure(overrides: list[str]) -> dict[str, object]:
    """Expansion with composition, then rules and plans."""
    expanded, composing = timed(lambda: expand([*overrides, "hardware=cpu", "plan_only=true"]))
    points = expanded.cells  # type: ignore[attr-defined]
    (cells, _), planning = timed(lambda: plan_cells(points, "sweep", lambda done, of: None))
    refused = sum(cell.outcome == "refused" for cell in cells)
    return {
        "cells": len(cells), "refused": refused, "composing": composing, "planning": planning,
    }  # fmt: skip


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, nargs="?", help="a file for what is printed")
    asked = parser.parse_args()
    if asked.out:
        writable(parser, asked.out)
    compose(["hardware=cpu"])  # imports, and Hydra's search for plugins
    found: dict[str, object] = {name: measure(typed) for name, typed in SWEEPS.items()}
    _, alone = timed(lambda: [compose([f"seed={n}", "hardware=cpu"]) for n in range(5)])
    found["hydra"] = {"compositions": 5, **alone}
    found |= {"machine": machine(), "environment": provenance()}
    text = json.dumps(found, indent=2)
    print(text)
    if asked.out:
        asked.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
