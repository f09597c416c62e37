"""The tables of notes/accuracy.md, from the records in results/."""

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from reference.gpu import memory_rows, time_rows

from eke.common.text import GIB
from eke.config.compose import compose
from eke.config.schema.techniques import Casts
from eke.estimate.memory import forecast
from eke.models.sizes import shared_state_bytes
from eke.plan.planner import replan
from eke.workflows.planning import plan_for

ABSENT = "not yet measured"

Content = dict[str, Any]

SHARING = {
    "ddp": "ddp", "fsdp": "FSDP2", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3",
    "zero2+optimizer_cpu": "ZeRO-2, optimizer on the host",
    "zero3+optimizer_cpu": "ZeRO-3, optimizer on the host",
    "zero3+params_cpu": "ZeRO-3, weights on the host, too",
}  # fmt: skip

DOUBTFUL = ("lengths=uniform", "fused_linear_cross_entropy=true", "peft=lora", "peft=ia3")


def accuracy_page(folder: Path) -> str:
    """All tables, as markdown.

    Args:
        folder: with the records.
    """
    parts = [_formulas(folder), _traces(folder), _ranks(folder), _torchtitan()]
    parts.append(_step_time(folder))
    return "\n\n".join(parts)


def main_tables(folder: Path) -> list[str]:
    """The tables of formulas, traces and step times, without their parts."""
    tables = (_formulas(folder), _traces(folder), _step_time(folder))
    parts = ("held out, rows", "several machines", "fitted", "T5-base,", "GPT-2 on two")
    return [
        "\n".join(row for row in table.splitlines() if not any(part in row for part in parts))
        for table in tables
    ]


def _read(folder: Path, name: str) -> Content | None:
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def percent(fraction: float) -> str:
    """With two digits that count, three places at most: `0.004 %`, `2.8 %`, `150 %`."""
    value = 100 * fraction
    digits = 3 if value < 0.01 else 2 if value < 1 else 1 if value < 10 else 0
    return f"{value:.{digits}f} %"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """As markdown."""
    lines = ["| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *rows)]
    return "\n".join(lines)


def _bounds(rows: list[Content]) -> tuple[str, str]:
    """How many truths lie within, and how far off the expected value is."""
    errors = sorted(abs(row["expected"] / row["measured"] - 1) for row in rows)
    inside = sum(row["low"] <= row["measured"] <= row["high"] for row in rows)
    widths = [(row["high"] - row["low"]) / row["measured"] for row in rows]
    at = int(0.95 * (len(errors) - 1))
    return (
        f"{inside} of {len(rows)}; median width {percent(statistics.median(widths))} of the truth",
        f"mean {percent(statistics.mean(errors))}, median {percent(statistics.median(errors))}, "
        f"95th percentile {percent(errors[at])}, largest {percent(errors[-1])}",
    )


def _formulas(folder: Path) -> str:
    found = _read(folder, "forecast_bounds_cpu")
    rows = []
    if found is None:
        rows.append(("random configurations on a CPU", ABSENT, ABSENT))
    else:
        plain = [r for r in found["rows"] if not any(word in r["overrides"] for word in DOUBTFUL)]
        where = f"`results/forecast_bounds_cpu.json`, seed {found['seed']}"
        rows.append((f"random configurations on a CPU ({where})", *_bounds(found["rows"])))
        what = "of these, without adapters, ragged samples and fused loss"
        rows.append((what, *_bounds(plain)))
    rows += memory_rows(folder) or [("GPUs today", ABSENT, ABSENT)]
    return table(("formulas", "truth within the bounds", "expected value off by"), rows)


PUBLISHED_TIMES = {
    "guide_v100": "the guides' nine rows, V100",
    "t5_a100": "T5-base, formats and accumulation, A100",
    "t5_a100_combined": "T5-base, techniques combined, A100",
    "t5_batch_a100": "T5-base, batch 1 to 32, A100",
    "t5_batch_rtx3090": "T5-base, batch 1 to 16, RTX 3090",
    "t5_rtx3090_combined": "T5-base, techniques combined, RTX 3090",
    "nvlink_titan_rtx": "GPT-2 on two TITAN RTX, with NVLink and without",
}
"""Table of src/eke/results/report/published -> how it is called."""


FOUNDRY = "GPT models on A100 and H100 by MosaicML (`results/step_time_foundry.json`), {}"


def _step_time(folder: Path) -> str:
    """How far off the time model's expected step is, and how often its range holds the truth."""
    rows = []
    published = _read(folder, "step_time_published")
    if published is None:
        rows.append(("published tables", ABSENT, ABSENT, ABSENT))
    else:
        named = {"all": "all published rows (`results/step_time_published.json`)"} | PUBLISHED_TIMES
        rows += [(words, *_times(published["summary"][name])) for name, words in named.items()]
    foundry = _read(folder, "step_time_foundry")
    if foundry is not None:
        rows += [(FOUNDRY.format(name), *_times(each)) for name, each in foundry["summary"].items()]
    cpu = _read(folder, "step_time_cpu")
    if cpu is None:
        rows.append(("random trainings on a CPU", ABSENT, ABSENT, ABSENT))
    else:
        drift = percent(cpu["summary"]["rounds_differ_median"])
        words = (
            f"random trainings on a CPU, rates from the other half (seed {cpu['seed']}; the same "
            f"training twice differed by {drift}, median, at a load of {cpu['load'][0]:.0f})"
        )
        rows.append((words, *_times(cpu["summary"]["held out"])))
    rows += time_rows(folder) or [("GPUs today", ABSENT, ABSENT, ABSENT)]
    return table(
        ("step time", "truth in the range", "high over low", "expected value off by"), rows
    )


def _times(found: Content) -> tuple[str, str, str]:
    return (
        f"{found['inside']} of {found['count']}",
        f"{found['high_over_low_median']:.2g} (median)",
        f"mean {percent(found['error_mean'])}, median {percent(found['error_median'])}, "
        f"largest {percent(found['error_max'])}",
    )


def _traces(folder: Path) -> str:
    rows = []
    cpu = _read(folder, "memory_truth_cpu")
    named = "random configurations on a CPU (`results/memory_truth_cpu.json`)"
    if cpu is None:
        rows.append((named, ABSENT))
    else:
        s = cpu["summary"]["all"]
        named = named[:-1] + f", seed {cpu['seed']})"
        rows.append(
            (
                named,
                f"of {s['n']} compared: mean {percent(s['mean'])}, 95th percentile "
                f"{percent(s['p95'])}, largest {percent(s['max'])}",
            )
        )
    guide = _read(folder, "guide_memory")
    named = "the guides' nine rows with the libraries of that day (`results/guide_memory.json`)"
    rows.append((named, ABSENT if guide is None else _guide(guide)))
    on_gpus = sorted(folder.glob("memory_on_gpu_*.json"))
    for path in on_gpus:
        rows.append((f"`results/{path.name}`", _on_gpu(json.loads(path.read_text()))))
    if not on_gpus:
        rows.append(("what a GPU reserves (`python benchmarks/memory_on_gpu.py`)", ABSENT))
    return table(("traces", "expected value off by"), rows)


def _guide(found: Content) -> str:
    errors = [abs(row["error_frac"]) for row in found["rows"]]
    return f"mean {percent(statistics.mean(errors))}, largest {percent(max(errors))}"


def _on_gpu(found: Content) -> str:
    """Reserved and allocated memory, each of so many configurations."""
    parts = [
        f"{name}, of {s['n']}: mean {percent(s['mean'])}, 95th percentile {percent(s['p95'])}, "
        f"largest {percent(s['max'])}"
        for name, s in found["summary"].items()
    ]
    return "; ".join(parts) or ABSENT


def _ranks(folder: Path) -> str:
    head = ("two processes on a CPU", "runs", "truth within", "formulas off by", "traced off by",
            "state exact")  # fmt: skip
    found = _read(folder, "memory_truth_ranks_cpu")
    if found is None:
        return table(head, [("random configurations", *[ABSENT] * 5)])
    rows = []
    for name in ("all", *SHARING):
        part = found["summary"].get(name)
        if part is None:
            continue
        formulas, traced, states = part["formulas"], part.get("traced"), part["states"]
        within = part["n"] - formulas["outside"]
        label = SHARING.get(name, f"all (seed {found['seed']})")
        exact = f"{states['exact']} of {states['n']}" if states["n"] else "-"
        cells = [_off(each) if each else ABSENT for each in (formulas, traced)]
        rows.append((label, str(part["n"]), f"{within} of {part['n']}", *cells, exact))
    return table(head, rows)


PUBLISHED = {
    "not compiled": (("",), {8: 82.4, 128: 67.0}),
    "compiled": (("compile=inductor", "compile.regional=true"), {8: 77.0, 128: 62.0}),
}
"""Llama 3.1 8B on H100 with 96 GB, 2 rows of 8,192 tokens, selective recomputation, float32 AdamW:
GPUs -> GiB that PyTorch reserved at most (torchtitan, benchmarks/llama3_h100_202412_torchtitan.md).
"""


def _torchtitan() -> str:
    """Published peaks on several GPUs, and forecasts of the same by formulas: nothing is fitted."""
    rows, states = [], {}
    for name, (more, published) in PUBLISHED.items():
        found = {count: _forecast(count, more) for count in published}
        states |= {count: state for count, (_, state) in found.items()}
        for count, gib in published.items():
            off = f"{100 * (found[count][0] / gib - 1):+.1f} %"
            rows.append((f"{count}, {name}", f"{gib:.1f}", f"{found[count][0]:.1f}", off))
        change = [f"{each[8] - each[128]:.1f}" for each in
                  (published, {count: peak for count, (peak, _) in found.items()})]  # fmt: skip
        rows.append((f"8 less 128, {name}", *change, ""))
    state = f"{states[8] - states[128]:.1f}"
    rows.append(("of this the sharded state", "", state, ""))
    return table(("torchtitan, GPUs", "reserved, GiB", "expected, GiB", "off by"), rows)


def _forecast(count: int, more: tuple[str, ...]) -> tuple[float, float]:
    """GiB that PyTorch is expected to reserve, and of weights, gradients and optimizer state."""
    typed = ["model=llama3_8b", "precision=bf16", "hardware=h100", "data=synthetic",
             "data.seq_len=8192", "batch.per_device=2", "memory=checkpointing_selective",
             "distributed=fsdp", f"distributed.num_processes={count}",
             f"distributed.num_nodes={count // 8}", *filter(None, more)]  # fmt: skip
    plan = plan_for(compose(typed), planning=True)
    casts = replace(plan.config.precision, casts=Casts.per_step)
    plan = replan(plan, replace(plan.config, precision=casts))
    found, state = forecast(plan), shared_state_bytes(plan.config, plan.size).total
    return (found.peak.expected - found.components["context"]) / GIB, state / GIB


def _off(part: Content) -> str:
    return f"median {percent(part['median'])}, largest {percent(part['max'])}"
