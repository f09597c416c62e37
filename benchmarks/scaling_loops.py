"""Eke's loop beside one written by hand, by the model's depth and width and by the batch.

`cpu`: a BERT of 6 layers, 64 wide, 4 sequences of 32 tokens, and what differs from it in one
number; fp32, one thread. `gpu`: BERT-large on 512 tokens, of 2 to 24 layers and with 1 to 32
sequences, and a Llama of 1B parameters on 2048; bf16 autocast.

`bare` takes batches that lie ready on the device. `bare_data` is fed by eke's pipeline; on a GPU,
where two copies of a model must do, there is none.
"""

import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: it is read once

import torch
from loops import (
    BERT_WORKLOAD,
    LOG_EVERY,
    Bare,
    Eke,
    Loop,
    bert,
    check_same_work,
    from_memory,
    from_pipeline,
    make_job,
)
from paired import Turns, play_round, ratio, summarize

from eke.common.errors import ConfigError
from eke.training.loop.failure import is_out_of_memory

GPU_WORKLOAD = "bf16 autocast, fused AdamW, clipping at 1.0"
WARMUP = 2
"""Steps at the start of a turn that are not timed."""
BF16_EPSILON = 2.0**-8
"""Losses in bf16 may differ by this much where a GPU's kernels add in no fixed order."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One model and batch."""

    label: str
    varies: str
    """What distinguishes it from the others of its kind."""
    batch: int
    overrides: Callable[[int], tuple[str, ...]]
    """Number of steps -> what to type."""


def cpu_cases() -> Iterator[Case]:
    """A small BERT, its number of layers, its width and its batch."""

    def case(varies: str, layers: int = 6, width: int = 64, batch: int = 4) -> Case:
        label = f"{layers} layers, {width} wide, batch {batch}"
        return Case(label, varies, batch, lambda steps: bert(layers, steps, width, batch))

    for layers in (2, 6, 12, 24):
        yield case("layers", layers=layers)
    for width in (128, 256):
        yield case("width", width=width)
    for batch in (1, 16, 64):
        yield case("batch", batch=batch)


def gpu_cases() -> Iterator[Case]:
    """BERT-large by depth and batch, and a Llama."""

    def case(varies: str, model: str, batch: int, *more: str) -> Case:
        sizes = [text.partition(".")[2] for text in more if "." in text]
        label = ", ".join([model, f"batch {batch}", *sizes])
        shared = (
            f"model={model}", "data=synthetic", f"batch.per_device={batch}", "precision=bf16",
            "optimizer=adamw_fused", "schedule=constant", "schedule.warmup_frac=0",
            "model.dropout=0", *more,
        )  # fmt: skip
        return Case(label, varies, batch, lambda steps: (*shared, f"train.steps={steps}"))

    classify = ("task=sequence_classification", "data.seq_len=512")
    for layers in (2, 6, 12, 24):
        depth = f"model.num_hidden_layers={layers}"
        yield case("layers", "bert_large", 4, depth, *classify)
    for batch in (1, 16, 32):
        yield case("batch", "bert_large", batch, *classify)
    for batch in (1, 4):
        yield case("batch", "llama_1b", batch, "data.seq_len=2048")


SIZES = {"cpu": (BERT_WORKLOAD, cpu_cases), "gpu": (GPU_WORKLOAD, gpu_cases)}


def compare_loops(size: str, num_steps: int, num_rounds: int, budget_s: float) -> Iterator[Row]:
    """All cases of a size, after each of which there is something to write down.

    Args:
        size: of SIZES.
        num_steps: of a turn.
        num_rounds: turns of each loop.
        budget_s: no case begins later.

    Yields:
        `workload`, `steps_per_turn` and `loops`, a row for each case so far.
    """
    workload, cases = SIZES[size]
    rows: list[Row] = []
    end = time.monotonic() + budget_s
    for case in cases():
        if time.monotonic() > end:
            print(f"{case.label}: no time is left for it", file=sys.stderr)
            continue
        rows.append(row_of(case, size == "gpu", num_steps, num_rounds))
        print(f"{case.label}: {rows[-1]['outcome']}", file=sys.stderr)
        yield {"workload": workload, "steps_per_turn": num_steps, "loops": rows}


def row_of(case: Case, on_gpu: bool, num_steps: int, num_rounds: int) -> Row:
    """One case, whatever becomes of it; its memory is given back.

    Not comparable, refused, or an error of the device's libraries: the next case may do.
    """
    try:
        return compare(case, on_gpu, num_steps, num_rounds)
    except (RuntimeError, SystemExit, ConfigError) as error:
        outcome = "oom" if is_out_of_memory(error) else " ".join(str(error).split())[:300]
        return {"case": case.label, "varies": case.varies, "outcome": outcome}
    finally:
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()


def compare(case: Case, on_gpu: bool, num_steps: int, num_rounds: int) -> Row:
    """The loops in turns; every other round the other way round."""
    steps = (num_rounds + 2) * (WARMUP + num_steps) + LOG_EVERY
    with tempfile.TemporaryDirectory() as folder:
        job = make_job(Path(folder), *case.overrides(steps), hardware="auto" if on_gpu else "cpu")
        loops: dict[str, Loop] = {"bare": Bare(job, from_memory(job)), "eke": Eke(job)}
        if not on_gpu:
            loops["bare_data"] = Bare(job, from_pipeline(job))
        within = BF16_EPSILON if on_gpu else 1e-5
        check_same_work(*loops.values(), within=within)
        turns = {name: Turns() for name in loops}
        order = [(waiting(loop.advance, on_gpu), turns[name]) for name, loop in loops.items()]
        for number in range(num_rounds):
            play_round(order if number % 2 == 0 else order[::-1], num_steps, WARMUP)
    return {
        "case": case.label,
        "varies": case.varies,
        "outcome": "ok",
        "batch": case.batch,
        "parameters": sum(p.numel() for p in job.parameters),
        "wall": speeds(turns, "wall", case.batch),
        "cpu": speeds(turns, "cpu", case.batch),
    }


def waiting(advance: Callable[[int], None], on_gpu: bool) -> Callable[[int], None]:
    """The same, until the GPU has done it."""
    if not on_gpu:
        return advance

    def until_done(num_steps: int) -> None:
        advance(num_steps)
        torch.cuda.synchronize()

    return until_done


def speeds(turns: dict[str, Turns], clock: str, batch: int) -> Row:
    """Steps and samples per second of each loop, and eke's speed over the others'."""
    per_s = {name: [1e3 / ms for ms in each.of(clock)] for name, each in turns.items()}
    return {
        "steps_per_s": {name: summarize(each).as_dict() for name, each in per_s.items()},
        "samples_per_s": {
            name: summarize([batch * value for value in each]).as_dict()
            for name, each in per_s.items()
        },
        "eke_speed_over": {
            name: ratio(turns[name], turns["eke"], clock).as_dict()
            for name in turns
            if name != "eke"
        },
    }


def print_loops(rows: Sequence[Row]) -> None:
    """A line for each case and clock."""
    print(f"\n{'':36}{'clock':>6}{'steps/s':>9}{'samples/s':>11}   eke's speed over, [p10 p90]")
    for row in rows:
        if row["outcome"] != "ok":
            print(f"{row['case']:36}{row['outcome']:>6}")
            continue
        for clock in ("wall", "cpu"):
            found = row[clock]
            print(
                f"{row['case']:36}{clock:>6}{found['steps_per_s']['eke']['median']:9.1f}"
                f"{found['samples_per_s']['eke']['median']:11.1f}",
                *(
                    f"  {name} {each['median']:.3f} [{each['p10']:.3f} {each['p90']:.3f}]"
                    for name, each in found["eke_speed_over"].items()
                ),
            )
