"""Recipes against Hugging Face Trainer: its defaults, the guides' best flags, the same, and eke's.

python benchmarks/recipes.py [--size cpu] [--rounds N] [--steps N] [--budget S] [--out FILE]

    trainer        HF Trainer with its defaults
    trainer_best   HF Trainer with those of the guides' flags that save time
    eke_best       eke with the same flags
    fastest        eke recipe=fastest, with the same samples in an optimizer step
    fastest_steady with recipe.horizon=steady, as for days: on a GPU it compiles
    hand           hand_loop.py, which compiles too; on a GPU that knows bf16

One model, the same samples in the same order, learning rate, schedule and clipping; the same first
weights where they are small enough to write down. Every turn is a process of its own; a round has
one turn of each, and every other round goes the other way round. Ratios are of a round's turns.
Sizes: `cpu` (a Llama of 2.4 M parameters on real text), `bert_large`, `llama_1b`; the last two want
a GPU and take about eight minutes at the budget they start with.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from arguments import at_least, writable
from loops import make_job
from on_gpu import Finished, spawn
from paired import summarize
from provenance import provenance

from eke.common.files import write_json
from eke.common.text import format_bytes
from eke.config.compose import compose
from eke.hardware import detect
from eke.workflows.auto_batch import chosen_overrides
from eke.workflows.planning import plan_for

LR = 1e-3


@dataclass(frozen=True)
class Size:
    """What is trained."""

    shape: str
    """Of plain_trainer.py."""
    size: str
    eke: tuple[str, ...]
    """The same for eke."""
    batch: int
    """Samples per optimizer step."""
    steps: int
    weights: bool
    """The first weights are small enough to write down."""


SIZES = {
    "cpu": Size(
        "llama_1b", "medium",
        ("model=tiny", "model.hidden_size=256", "model.num_hidden_layers=4",
         "model.num_attention_heads=4", "model.num_key_value_heads=2", "model.head_dim=64",
         "model.intermediate_size=512", "model.vocab_size=512", "data=python_source",
         "data.seq_len=128"),
        batch=8, steps=24, weights=True,
    ),
    "bert_large": Size(
        "bert_large", "full",
        ("model=bert_large", "task=sequence_classification", "data=synthetic", "data.seq_len=512"),
        batch=4, steps=60, weights=False,
    ),
    "llama_1b": Size(
        "llama_1b", "full",
        ("model=llama_1b", "data=synthetic", "data.seq_len=2048"),
        batch=4, steps=40, weights=False,
    ),
}  # fmt: skip

BEST = ("optimizer=adamw_fused", "dataloader=workers")
"""The flags of plain_trainer.BEST, as eke calls them."""

PLAIN = ("trainer", "trainer_best", "hand")
"""Rows without eke."""

Rows = list[tuple[str, tuple[str, ...]]]
"""Names and arguments of what is compared."""


@dataclass(frozen=True)
class Bench:
    """One comparison."""

    size: Size
    steps: int
    warmup: int
    folder: Path
    precision: str
    """The guides' 16-bit format for this device."""

    def shared(self) -> tuple[str, ...]:
        """Overrides of every run of eke."""
        return (
            *self.size.eke,
            "data.num_eval_samples=8",
            f"optimizer.lr={LR:g}",
            "optimizer.weight_decay=0",
            "schedule=linear",
            "schedule.warmup_frac=0",
            f"train.steps={self.steps}",
            f"train.log_every={max(1, self.steps // 4)}",  # as plain_trainer.py: a write waits
            f"train.timing_warmup_steps={self.warmup}",
            "train.checkpoint_every=null",
            "train.save_final=false",
            "tracker=none",
        )

    def rows(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Name and arguments: of plain_trainer.py if in PLAIN, else of `train.py`."""
        size = self.size
        plain = (
            size.shape, "--size", size.size, "--steps", str(self.steps), "--warmup",
            str(self.warmup), "--batch", str(size.batch), "--lr", str(LR),
            "--samples", str(self.folder / "samples.pt"),
            *(("--weights", str(self.folder / "weights.pt")) if size.weights else ()),
        )  # fmt: skip
        yield "trainer", plain
        yield "trainer_best", (*plain, "--flags", "best", "--precision", self.precision)
        same = f"batch.per_device={size.batch}"
        tf32 = ("precision.tf32=on",) if torch.cuda.is_available() else ()
        yield "eke_best", (same, f"precision={self.precision}", *tf32, *BEST)
        target = f"batch.target={size.batch}"
        yield "fastest", ("recipe=fastest", target)
        if torch.cuda.is_available():
            yield "fastest_steady", ("recipe=fastest", "recipe.horizon=steady", target)
            if self.precision == "bf16":
                yield "hand", (*plain, "--loop", "hand", "--precision", "bf16")

    def save_inputs(self) -> None:
        """The samples of every step in eke's order, and eke's first weights."""
        # On the host, whose memory is not what the comparison needs.
        more = (*self.shared(), f"batch.per_device={self.size.batch}", "ignore_forecast=true")
        job = make_job(
            self.folder, *(o for o in more if "log_every" not in o and o != "tracker=none")
        )
        samples = []
        for cut in job.data.train_steps(0):
            for batch in cut:
                ids, labels = batch.inputs["input_ids"], batch.labels
                rows = zip(ids, labels if labels.dim() == 1 else ids, strict=True)
                samples += [{"input_ids": i.clone(), "labels": label.clone()} for i, label in rows]
            if len(samples) >= self.steps * self.size.batch:
                break
        torch.save(samples, self.folder / "samples.pt")
        if self.size.weights:
            torch.save(job.bare_model.state_dict(), self.folder / "weights.pt")

    def turn(self, name: str, arguments: tuple[str, ...], limit_s: float) -> dict[str, Any]:
        """One training in a process of its own."""
        if name in PLAIN:
            done = spawn(["benchmarks/plain_trainer.py", *arguments], limit_s)
            return json.loads(done.out.splitlines()[-1]) if done.code == 0 else done.failure
        with tempfile.TemporaryDirectory() as folder:
            runs = f"paths.runs={folder}/runs"
            done = spawn(["train.py", *self.shared(), *arguments, runs], limit_s)
            return read_run(done, Path(folder))


def read_run(done: Finished, folder: Path) -> dict[str, Any]:
    """What a run of eke has measured, under the names of plain_trainer.py."""
    files = list(folder.glob("runs/*/record.json"))
    if not files:
        return done.failure
    record = json.loads(files[0].read_text())
    if record["outcome"] != "ok":  # perhaps before there were metrics
        reason = (record.get("failure") or {}).get("message", "")
        return {"outcome": record["outcome"], "reason": reason}
    rows = [
        json.loads(line) for line in (files[0].parent / "metrics.jsonl").read_text().splitlines()
    ]
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    quarter = max(1, len(losses) // 4)
    measured = (record.get("memory") or {}).get("measured") or {}
    return {
        "outcome": "ok",
        "samples_per_s": record["throughput"]["samples_per_s"],
        "median_step_s": (record["timing"]["steady_step_s"] or {}).get("median"),
        "peak_allocated_bytes": measured.get("peak_allocated_bytes")
        if torch.cuda.is_available()
        else None,
        "process_peak_bytes": measured.get("process_peak_bytes"),
        "losses": [sum(losses[n : n + quarter]) / quarter for n in range(0, 4 * quarter, quarter)],
        "mfu_frac": record["throughput"]["mfu_frac"],
        "compile_s": record["timing"].get("compile_s"),
    }


def play_rounds(
    bench: Bench, rows: Rows, asked: argparse.Namespace, end: float
) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """All turns so far, after each round.

    A round that would not be over in time, if it took as long as the longest, does not begin. What
    the first one takes nobody knows: no turn gets more than what is left.

    Args:
        bench: what is compared.
        rows: its names and arguments.
        asked: `rounds`, `limit` of a turn and `budget`.
        end: when the budget is over, on the monotonic clock.
    """
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name, _ in rows}
    longest = 0.0
    for number in range(asked.rounds):
        began = time.monotonic()
        if number and began + longest > end:
            print(f"another round would take longer than --budget={asked.budget:g} seconds")
            return
        for name, arguments in rows if number % 2 == 0 else rows[::-1]:
            left = min(asked.limit, end - time.monotonic())
            turns[name].append(bench.turn(name, arguments, left))
            print(f"round {number} {name:14} {turns[name][-1].get('samples_per_s')}", flush=True)
        longest = max(longest, time.monotonic() - began)
        yield turns


def compare(turns: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Each loop against Trainer's two, by the times of a round."""
    table = []
    for name, mine in turns.items():
        row: dict[str, Any] = {"row": name, "rounds": len(mine)}
        for reference in ("trainer", "trainer_best"):
            pairs = zip(mine, turns[reference], strict=True)
            both = [(a.get("samples_per_s"), b.get("samples_per_s")) for a, b in pairs]
            ratios = [a / b for a, b in both if a and b]
            if len(ratios) > 1:
                row[f"times_{reference}"] = summarize(ratios).as_dict()
        last = [each["losses"][-1] for each in mine if each.get("losses")]
        row["last_quarter_loss"] = sum(last) / len(last) if last else None
        for key in ("peak_allocated_bytes", "process_peak_bytes", "samples_per_s", "mfu_frac"):
            found = sorted(each[key] for each in mine if each.get(key) is not None)
            row[key] = found[len(found) // 2] if found else None
        table.append(row)
    return table


def show(table: list[dict[str, Any]]) -> None:
    """One line a row."""
    print(f"\n{'':14}{'samples/s':>10}{'x trainer [p10 p90]':>24}{'x best [p10 p90]':>24}", end="")
    print(f"{'peak':>12}{'loss':>8}")
    for row in table:
        cells = [f"{row['row']:14}{row['samples_per_s'] or 0:10.2f}"]
        for reference in ("times_trainer", "times_trainer_best"):
            found = row.get(reference)
            text = f"{found['median']:.2f} [{found['p10']:.2f} {found['p90']:.2f}]" if found else ""
            cells.append(f"{text:>24}")
        peak = row["peak_allocated_bytes"] or row["process_peak_bytes"]
        cells.append(f"{format_bytes(peak) if peak else '':>12}")
        loss = row["last_quarter_loss"]
        print("".join(cells) + (f"{loss:8.4f}" if loss is not None else ""))


def main() -> None:
    """Measure, print, write after each round."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="cpu")
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--steps", type=at_least(4))
    parser.add_argument("--limit", type=float, default=180, help="seconds for one turn")
    parser.add_argument("--budget", type=float, default=450, help="seconds for all of it")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--note", default="", help="what a reader should know of the machine")
    asked = parser.parse_args()
    end, device = time.monotonic() + asked.budget, detect()
    if asked.size != "cpu" and device.kind != "cuda":
        parser.error("no CUDA device here; --size cpu is for one without")
    size = SIZES[asked.size]
    steps = asked.steps or size.steps
    out = writable(parser, asked.out or Path(f"results/recipes_{asked.size}.json"))
    half = "bf16" if device.kind == "cpu" or (device.capability or (0, 0)) >= (8, 0) else "fp16"
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(size, steps, max(2, steps // 4), Path(folder), half)
        bench.save_inputs()
        rows = list(bench.rows())
        plan = plan_for(compose(["recipe=fastest", *bench.shared()]), planning=True)
        record: dict[str, Any] = {
            "benchmark": "recipes",
            "size": asked.size,
            "device": device.name,
            "environment": provenance(),
            "cores": os.cpu_count(),
            "note": asked.note,
            "samples_per_step": size.batch,
            "steps": steps,
            "commands": {name: " ".join(each).replace(folder, "FOLDER") for name, each in rows},
            "chosen": chosen_overrides(plan),
        }
        for turns in play_rounds(bench, rows, asked, end):
            record |= {"table": compare(turns), "turns": turns, "load": os.getloadavg()}
            write_json(out, record)
    show(record["table"])
    print(f"\nwritten to {out}")


if __name__ == "__main__":
    main()
