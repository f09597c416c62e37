"""Peak memory of training on this GPU, measured against what is predicted for it.

python benchmarks/memory_on_gpu.py [--size small] [--budget S] [--out FILE]

BERT-large and a Llama of 1B parameters, 64 configurations, two steps each, every one in a process
of its own: a quarter of an hour, which is two calls of `--budget` seconds. The record,
results/memory_on_gpu_DEVICE.json, is written after each; the same command again does what is
missing. `--size small` runs two configurations of each model in miniature, on a CPU too (there
against the tensor allocator); that shows that the script works and measures nothing of a GPU.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO / "src"), str(REPO / "tests")]

from arguments import writable  # noqa: E402  # after the path is there

from eke.common.errors import ConfigError  # noqa: E402  # after the path is there
from eke.common.files import write_json  # noqa: E402  # after the path is there
from eke.config.compose import compose  # noqa: E402  # after the path is there
from eke.estimate.memory.trace_client import trace_all  # noqa: E402  # after the path is there
from eke.hardware import detect, environment  # noqa: E402  # after the path is there
from eke.plan.planner import Plan  # noqa: E402  # after the path is there
from eke.workflows.planning import plan_for  # noqa: E402  # after the path is there

MODELS = {
    "bert_large": ["model=bert_large", "task=sequence_classification", "data.seq_len=512"],
    "llama_1b": ["model=llama_1b", "task=causal_lm", "data.seq_len=1024"],
}
SMALL = {
    "bert_large": ["model=tiny_bert", "task=sequence_classification", "data.seq_len=64"],
    "llama_1b": ["model=tiny", "task=causal_lm", "data.seq_len=64"],
}
PRECISIONS = ("precision=fp32", "precision=fp16", "precision=bf16", "precision=bf16_pure")
TECHNIQUES = (
    "batch.per_device=1", "batch.per_device=4", "batch.per_device=4 memory=checkpointing",
    "batch.per_device=2 batch.accumulation=2", "batch.per_device=2 attention=eager",
    "batch.per_device=2 optimizer=adamw_foreach", "batch.per_device=2 optimizer=adafactor",
    "batch.per_device=4 peft=lora",
)  # fmt: skip
COMMON = (
    "data=synthetic", "data.num_samples=32", "data.num_eval_samples=4", "train.steps=2",
    "train.save_final=false", "tracker=none",
)  # fmt: skip

MEASURE = """
import json, sys, tempfile
from pathlib import Path
import torch
from eke.workflows.planning import plan_for
from eke.config.compose import compose
from trained import train_job
plan = plan_for(compose(sys.argv[1:]), planning=False)
with tempfile.TemporaryDirectory() as folder:
    job = train_job(plan, Path(folder) / "run")
if plan.device.kind == "cuda":
    cuda = torch.cuda
    found = {"reserved": cuda.max_memory_reserved(), "allocated": cuda.max_memory_allocated()}
else:
    found = {"reserved": job.profiled_peak, "allocated": job.profiled_peak}
print("\\n" + json.dumps(found))
"""


def configurations(small: bool) -> list[tuple[str, ...]]:
    """Command lines: each quarter of them has every technique, each with one of the formats."""
    models = SMALL if small else MODELS
    technique = TECHNIQUES[:2] if small else TECHNIQUES
    precision = PRECISIONS[:1] if small else PRECISIONS
    found = []
    for quarter in range(len(precision)):
        for number, how in enumerate(technique):
            of = precision[(quarter + number) % len(precision)]
            found += [(*model, *how.split(), of, *COMMON) for model in models.values()]
    return found


def planned(overrides: tuple[str, ...]) -> Plan | None:
    """Its plan for this machine; None where a rule refuses it."""
    try:
        return plan_for(compose(overrides), planning=True)
    except ConfigError as error:
        print(f"refused: {' '.join(overrides)}: {error}")
        return None


def measure(overrides: tuple[str, ...], limit_s: float) -> dict[str, Any]:
    """Peaks of one training, or how it ended."""
    folders = [REPO / "src", REPO / "tests", os.environ.get("PYTHONPATH")]
    path = os.pathsep.join(str(folder) for folder in folders if folder)
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-c", MEASURE, *overrides],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": path},
                capture_output=True,
                text=True,
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"outcome": "timeout"}
    if done.returncode:
        return {"outcome": "failed", "reason": " ".join(done.stderr.split())[-300:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def predicted(phases: dict[str, int], kind: str) -> int:
    """The peak that is comparable: on a CPU a run looks at a training step alone."""
    steps = ("forward", "backward", "optimizer")
    return max(phases[p] for p in (phases if kind == "cuda" else steps))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors of both quantities, and how often `fits` would have been wrong at a margin of 5 %."""
    found: dict[str, Any] = {}
    for name in ("reserved", "allocated"):
        errors = [r[f"predicted_{name}"] / r[name] - 1 for r in rows if name in r and r["traced"]]
        if errors:
            sizes = sorted(abs(error) for error in errors)
            found[name] = {
                "n": len(sizes),
                "mean": round(statistics.mean(sizes), 5),
                "p95": round(sizes[min(len(sizes) - 1, int(0.95 * len(sizes)))], 5),
                "max": round(sizes[-1], 5),
                "false_fits_frac": round(sum(e < -0.05 for e in errors) / len(errors), 5),
            }
    return found


def main() -> None:
    """Predict all, measure each, write down as it goes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=("full", "small"), default="full")
    parser.add_argument("--budget", type=float, default=450.0, help="seconds")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    start, device = time.monotonic(), detect()
    small = arguments.size == "small"
    if device.kind != "cuda" and not small:
        parser.error("there is no GPU here; --size small runs on a CPU")
    name = device.name.lower().replace(" ", "_")
    out = writable(parser, arguments.out or REPO / "results" / f"memory_on_gpu_{name}.json")
    earlier = json.loads(out.read_text())["rows"] if out.exists() else []
    rows = [row for row in earlier if "reserved" in row]
    known = {row["overrides"] for row in rows}
    plans = {o: plan for o in configurations(small) if (plan := planned(o)) is not None}
    missing = {o: plan for o, plan in plans.items() if " ".join(o) not in known}
    answers = trace_all(
        list(missing.values()), processes=max(1, min(4, (os.cpu_count() or 2) // 2))
    )
    taken = time.monotonic() - start
    print(f"{len(missing)} configurations traced in {taken:.0f} s", flush=True)
    for (overrides, plan), answer in zip(missing.items(), answers, strict=True):
        left = arguments.budget - (time.monotonic() - start)
        if left < 5:
            print("the budget is used up; the same command again does the rest")
            break
        row: dict[str, Any] = {"overrides": " ".join(overrides), "traced": bool(answer.traced)}
        if answer.traced:
            kind = plan.device.kind
            row["predicted_reserved"] = predicted(answer.traced.reserved, kind)
            row["predicted_allocated"] = predicted(answer.traced.allocated, kind)
            if kind == "cpu":
                row["predicted_reserved"] = row["predicted_allocated"]
        else:
            row["reason"] = answer.reason
        row |= measure(overrides, left)
        rows.append(row)
        write_json(out, {"environment": environment(), "summary": summary(rows), "rows": rows})
        print(json.dumps(row), flush=True)
    print(json.dumps(summary(rows), indent=1))


if __name__ == "__main__":
    main()
