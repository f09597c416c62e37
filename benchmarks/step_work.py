"""Count what each family's layers do in a step, operator by operator: launches and bytes moved.

python benchmarks/step_work.py [--out FILE]

Writes src/eke/estimate/time/counted.json, which the time model reads: for each family, kind of
attention, number format and with dropout or without, how many kernels one layer launches forward
and backward, and how many bytes they move per number of each kind of tensor (residual stream,
heads' outputs, feed-forward, scores, weights). Nothing is timed and nothing runs on a device: the
run's own builders work on tensors without data (tests/counted_work.py), on several sizes, and the
numbers of bytes are solved for. They are exact where the residual printed is 0.
"""

import argparse
import json
import sys
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO / "tests"))

from arguments import as_table, writable  # noqa: E402  # after the path is there
from counted_work import Count, counted  # noqa: E402  # a helper of the tests
from unit.plan.cases import GPU, plan_of  # noqa: E402

from eke.estimate.memory.components import shape_of  # noqa: E402
from eke.estimate.time.flops import layer_units, outer_units  # noqa: E402

FAMILIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "bert": ("tiny_bert", ("masked_lm", "sequence_classification")),
    "t5": ("tiny_t5", ("seq2seq_lm", "sequence_classification")),
    "gpt2": ("tiny_gpt2", ("causal_lm", "sequence_classification")),
    "llama": ("tiny", ("causal_lm", "sequence_classification")),
    "qwen3": ("tiny_qwen3", ("causal_lm",)),
    "mixtral": ("tiny_moe", ("causal_lm",)),
}
"""Family -> an option of it, and its tasks."""

DROPS_SCORES_ALONE = ("llama", "qwen3", "mixtral")
"""Families whose only dropout is attention's."""

PRECISIONS = {"wide": "fp32", "cast": "bf16", "narrow": "bf16_pure"}
KERNELS = {"fused": "sdpa", "eager": "eager"}
DROPOUTS = {"whole": "0", "dropped": "0.1"}

NAMES = ("rows", "len", "hidden", "heads", "dim", "groups", "inner", "vocab")

SIZES = tuple(
    dict(zip(NAMES, numbers, strict=True))
    for numbers in (
        (4, 128, 256, 4, 64, 2, 512, 1000),
        (8, 256, 128, 2, 96, 1, 768, 3000),
        (2, 512, 512, 8, 32, 4, 640, 1000),
        (16, 64, 768, 12, 64, 3, 1024, 5000),
        (3, 384, 320, 4, 128, 1, 2560, 2000),
        (1, 1024, 256, 2, 192, 2, 512, 800),
        (6, 192, 1024, 16, 64, 4, 512, 1500),
        (5, 448, 192, 6, 64, 3, 192, 4000),
        (20, 48, 640, 10, 48, 5, 320, 12000),
    )
)
"""More sizes than there are kinds of tensors."""

PHASES = ("forward", "backward")


def main() -> int:
    """Count, solve and write; returns 1 where a residual is above one part in a hundred."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=REPO / "src/eke/estimate/time/counted.json")
    parser.add_argument("--family", choices=FAMILIES)
    arguments = parser.parse_args()
    writable(parser, arguments.out)
    warnings.simplefilter("ignore")
    content: dict[str, Any] = {}
    if arguments.out.exists():
        content = json.loads(arguments.out.read_text())
    worst = 0.0
    for family in [arguments.family] if arguments.family else FAMILIES:
        for combination in product(PRECISIONS, KERNELS, DROPOUTS):
            if family in DROPS_SCORES_ALONE and combination[2] == "dropped":
                continue  # of eager attention one kernel more
            layers, residual = solved(family, *combination)
            content.setdefault(family, {})["/".join(combination)] = layers
            worst = max(worst, residual)
            print(family, *combination, f"{residual:.5f}", flush=True)
            arguments.out.write_text(as_table(content) + "\n")
    return int(worst > 0.01)


def typed(
    family: str, size: dict[str, int], precision: str, kernel: str, dropout: str
) -> list[str]:
    """Overrides of one configuration."""
    option, _ = FAMILIES[family]
    attention = KERNELS[kernel].split()
    found = [f"model={option}", f"precision={PRECISIONS[precision]}", f"attention={attention[0]}",
             *attention[1:], f"model.dropout={DROPOUTS[dropout]}", "data=synthetic",
             f"data.seq_len={size['len']}", f"batch.per_device={size['rows']}",
             f"model.max_position_embeddings={size['len']}",
             f"model.hidden_size={size['hidden']}", f"model.num_attention_heads={size['heads']}",
             f"model.intermediate_size={size['inner']}", f"model.vocab_size={size['vocab']}",
             "optimizer=sgd", "batch.accumulation=1"]  # fmt: skip
    if family in ("llama", "qwen3", "mixtral"):
        found += [f"model.head_dim={size['dim']}", f"model.num_key_value_heads={size['groups']}"]
    if family == "t5":
        found.append(f"model.head_dim={size['dim']}")
        found.remove(f"model.max_position_embeddings={size['len']}")
    return found


def solved(family: str, precision: str, kernel: str, dropout: str) -> tuple[Any, float]:
    """Launches and bytes per unit of a layer and of what is around the layers."""
    _, tasks = FAMILIES[family]
    stacks = ("encoder", "decoder") if family == "t5" else ("layer",)
    found: dict[str, Any] = {}
    residual = 0.0
    each: dict[str, list[tuple[Any, Any]]] = {name: [] for name in (*stacks, *tasks)}
    for size in SIZES:
        base = typed(family, size, precision, kernel, dropout)
        for task in tasks if kernel == "fused" and dropout == "whole" else tasks[:1]:
            counts = depths(base, task, family)
            plan = counts["plan"]
            if task == tasks[0]:
                for name in stacks:
                    each[name].append((layer_units(shape_of(plan), name), counts[name]))
            rest = {p: counts["one"][p] - _sum(counts[name][p] for name in stacks) for p in PHASES}
            each[task].append(
                (outer_units(shape_of(plan), task == "sequence_classification"), rest)
            )
    for name, rows in each.items():
        if not rows or (name in tasks and kernel != "fused"):
            continue
        found[name], worst = fitted(rows)
        print(f"  {name}: {worst:.4f}", flush=True)
        residual = max(residual, worst)
    return found, residual


def _sum(counts: Any) -> Count:
    found = Count()
    for count in counts:
        found = Count(found.launches + count.launches, found.moved + count.moved, 0)
    return found


def depths(base: list[str], task: str, family: str) -> dict[str, Any]:
    """Counts of one layer more, and of a model with one."""

    def run(layers: int, decoders: int) -> Any:
        typed = [*base, f"task={task}", f"model.num_hidden_layers={layers}"]
        if family == "t5":
            typed.append(f"model.num_decoder_layers={decoders}")
        plan = plan_of(*typed, device=GPU)
        return plan, counted(plan)

    plan, one = run(2, 2)
    _, two = run(3, 2)
    found = {"plan": plan}
    per_layer = {phase: two[phase] - one[phase] for phase in PHASES}
    if family == "t5":
        _, three = run(2, 3)
        more = {phase: three[phase] - one[phase] for phase in PHASES}
        found |= {"encoder": per_layer, "decoder": more}
        less = {p: Count(per_layer[p].launches + more[p].launches,
                         per_layer[p].moved + more[p].moved) for p in PHASES}  # fmt: skip
    else:
        found["layer"] = less = per_layer
    # Two layers were traced: one of each stack is taken away here, the other one by the caller.
    found["one"] = {phase: one[phase] - less[phase] for phase in PHASES}
    return found


def fitted(rows: list[tuple[dict[str, float], dict[str, Count]]]) -> tuple[dict[str, Any], float]:
    """Bytes per unit and launches, by phase; and the largest relative residual."""
    names = list(rows[0][0])
    matrix = np.array([[units[name] for name in names] for units, _ in rows], float)
    scale = np.maximum(matrix.max(axis=0), 1.0)
    found, worst = {}, 0.0
    for phase in PHASES:
        moved = np.array([counts[phase].moved for _, counts in rows], float)
        weights = 1 / np.maximum(moved, 1.0)
        solution, *_ = np.linalg.lstsq(
            matrix / scale * weights[:, None], moved * weights, rcond=1e-9
        )
        values = solution / scale
        error = np.abs(matrix @ values - moved) / np.maximum(moved, 1.0)
        worst = max(worst, float(error.max()))
        launches = sorted(counts[phase].launches for _, counts in rows)[len(rows) // 2]
        found[phase] = {
            "launches": launches,
            **{
                name: round(float(v), 3)
                for name, v in zip(names, values, strict=True)
                if abs(v) > 5e-3
            },
        }
    return found, worst


if __name__ == "__main__":
    sys.exit(main())
