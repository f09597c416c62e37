"""All that is to be seen and measured when a GPU is at hand, in one command.

python benchmarks/on_gpu.py [--size small] [--stages NAME ...] [--budget S] [--out DIR] [--again]

    trainer     HF Trainer as it comes, a loop by hand as torchtitan's and eke in turns: BERT-large
                and a Llama of 1B parameters
    memory      the ten rows of the guides' table: throughput and memory
    tests       tests/gpu, each file in a process of its own
    ranks       several GPUs: bytes, blocked time and tokens/s of eke and of a loop as torchtitan's
                (benchmarks/sharding.py); nothing where there is one GPU
    techniques  every option of every technique: benchmarks/techniques.py

Each part runs in a fresh process with a time limit; a part that fails or takes too long is written
down and the next one starts. The record, results/on_gpu_DEVICE.json, is written after each part:
the same command again does what is missing or did not end well. `--size small` runs all of it in
miniature, on a CPU too; that shows that the script works and measures nothing.
"""

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from arguments import writable
from techniques import short_name, with_sources

from eke.common.files import write_json
from eke.hardware import detect, environment
from eke.plan.record import EXIT_RESUMABLE

REPO = Path(__file__).resolve().parents[1]
sys.path.append(
    str(REPO / "tests")
)  # the guides' table stands where docs/reference/techniques.md is made

from reference.published import ROWS  # noqa: E402  # after the path is there

Row = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """One thing to do, in a process of its own."""

    stage: str
    name: str
    limit_s: float
    do: Callable[["Part", float], Row]
    """The part itself and the seconds it may take."""
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finished:
    """A process that ended by itself, or was ended."""

    code: int | None
    """None: it took too long."""
    out: str
    err: str

    @property
    def failure(self) -> Row:
        """What is written down of a part that left nothing else."""
        if self.code is None:
            return {"outcome": "timeout"}
        return {"outcome": "crashed", "reason": " ".join((self.err or self.out).split())[-500:]}


def spawn(command: Sequence[str], limit_s: float, **variables: str) -> Finished:
    """Run Python with this repository's sources, and everything it starts, for so long."""
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=REPO,
        env={**with_sources(), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=limit_s)
        return Finished(process.returncode, out, err)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # eke's workers end with their supervisor
        out, err = process.communicate()
        return Finished(None, out, err)


def run_eke(part: Part, limit_s: float) -> Row:
    """`python train.py ...`: what its record has measured."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["train.py", *part.arguments, f"paths.runs={folder}/runs", "tracker=none"]
        done = spawn(command, limit_s)
        files = list(Path(folder).glob("runs/*/record.json"))
        if not files:
            return done.failure
        record = json.loads(files[0].read_text())
    memory = (record.get("memory") or {}).get("measured") or {}
    return {
        "outcome": record["outcome"],
        "reason": (record.get("failure") or {}).get("message", ""),
        "run_id": record["run_id"],
        "samples_per_s": record["throughput"]["samples_per_s"],
        "median_step_s": (record["timing"]["steady_step_s"] or {}).get("median"),
        "mfu_frac": record["throughput"]["mfu_frac"],
        "peak_allocated_bytes": memory.get("peak_allocated_bytes"),
        "peak_reserved_bytes": memory.get("peak_reserved_bytes"),
        "stages": memory.get("stages"),
        "parameters": record["plan"]["size"]["num_parameters"],
        "shared_device": record["shared_device"],
        "warnings": record["warnings"],
    }


def run_trainer(part: Part, limit_s: float) -> Row:
    """benchmarks/plain_trainer.py: what it prints."""
    done = spawn(["benchmarks/plain_trainer.py", *part.arguments], limit_s)
    if done.code != 0:
        return done.failure
    row: Row = json.loads(done.out.splitlines()[-1])
    return row


def run_tests(part: Part, limit_s: float) -> Row:
    """One file of tests: each test's outcome, seconds and, where it did not pass, its reason.

    Without options of the user's own: a `-q` among them would leave out the names.
    """
    on = "cpu" if detect().kind == "cpu" else "cuda"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.xml"
        plugins = ("-p", "no:cacheprovider", "-p", "no:benchmark")  # that one warns
        pytest = ["-m", "pytest", "-v", "-m", "gpu", *plugins, *part.arguments]
        done = spawn([*pytest, *one_test_at_most(), f"--junitxml={file}"], limit_s,
                     EKE_GPU_TESTS_ON=on, PYTEST_ADDOPTS="")  # fmt: skip
        if not file.exists():
            return {**done.failure, "tests": read_lines(done.out)}
        cases = [read_case(case) for case in ET.parse(file).getroot().iter("testcase")]
    counts = {o: sum(c["outcome"] == o for c in cases) for o in ("passed", "skipped", "failed")}
    return {"outcome": "failed" if counts["failed"] else "ok", **counts, "tests": cases}


def one_test_at_most() -> list[str]:
    """A limit for each test where pytest-timeout is there: one that hangs must not end its file."""
    return ["--timeout=100"] if importlib.util.find_spec("pytest_timeout") else []


def read_lines(out: str) -> list[Row]:
    """The tests that ended before their file did, by what pytest said of each."""
    found = re.findall(r"^\S+?::(.+?) (PASSED|FAILED|SKIPPED|ERROR)\b", out, re.MULTILINE)
    outcomes = {"PASSED": "passed", "SKIPPED": "skipped"}
    return [{"name": name, "outcome": outcomes.get(word, "failed")} for name, word in found]


def read_case(case: ET.Element) -> Row:
    """One test of pytest's report."""
    row: Row = {"name": case.get("name"), "outcome": "passed", "s": float(case.get("time", 0))}
    for child in case:
        if child.tag in ("skipped", "failure", "error"):
            row["outcome"] = "skipped" if child.tag == "skipped" else "failed"
            row["reason"] = " ".join((child.get("message") or "").split())[:500]
    return row


def run_ranks(part: Part, limit_s: float) -> Row:
    """benchmarks/sharding.py: what one way took, all ranks together."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "sharding.json"
        done = spawn(["benchmarks/sharding.py", *part.arguments, "--out", str(file)], limit_s)
        if done.code != 0:
            return done.failure
        content = json.loads(file.read_text())
    (row,) = content["ways"].values()
    del row["ranks"]
    return {"outcome": "ok", "size": content["size"], "ranks": content["ranks"], **row}


def run_techniques(part: Part, limit_s: float) -> Row:
    """benchmarks/techniques.py, which writes a file of its own and continues where it stopped."""
    # An option that has begun may take its time beyond the budget.
    budget = ["--budget", str(0.8 * limit_s), "--limit", str(0.2 * limit_s)]
    done = spawn(["benchmarks/techniques.py", *budget, *part.arguments], limit_s)
    if done.code == EXIT_RESUMABLE:
        return {"outcome": "unfinished", "reason": done.out.splitlines()[-1]}
    return {"outcome": "ok"} if done.code == 0 else done.failure


SMALL_EKE = (
    "model.hidden_size=64",
    "model.num_attention_heads=4",
    "model.intermediate_size=128",
    "model.num_hidden_layers=2",
    "model.vocab_size=320",
    "data.max_token=300",
)
"""For any family; the sizes of `--size small` in plain_trainer.py."""

SMALL_LLAMA = ("model.num_key_value_heads=2", "model.head_dim=16")

SPEEDS = {
    "bert_large": (
        ("fp32", "bf16"),
        ("model=bert_large", "task=sequence_classification", "batch.per_device=4"),
        512,
    ),
    "llama_1b": (("bf16",), ("model=llama_1b", "task=causal_lm", "batch.per_device=4"), 1024),
}
"""Shape of plain_trainer.py -> formats, the same in eke, and tokens of a sequence."""


def trainer_parts(small: bool) -> Iterator[Part]:
    """All three in turns, so that a drift of the device's clocks meets each of them."""
    steps, warmup, rounds = (6, 2, 1) if small else (40, 10, 2)
    for turn in range(rounds):
        for shape, (formats, model, seq_len) in SPEEDS.items():
            for precision in formats:
                name = f"{shape} {precision} {turn}"
                plain = ("--precision", precision, "--steps", str(steps), "--warmup", str(warmup))
                size = ("--size", "small") if small else ()
                yield Part("trainer", f"{name} hf", 120, run_trainer, (shape, *plain, *size))
                by_hand = (shape, *plain, *size, "--loop", "hand")
                yield Part("trainer", f"{name} hand", 120, run_trainer, by_hand)
                yield Part(
                    "trainer",
                    f"{name} eke",
                    120,
                    run_eke,
                    (
                        *model,
                        f"precision={precision}",
                        "data=synthetic",
                        f"data.seq_len={64 if small else seq_len}",
                        "data.num_samples=64",
                        "data.num_eval_samples=8",
                        f"train.steps={steps}",
                        f"train.timing_warmup_steps={warmup}",
                        "train.checkpoint_every=null",
                        "train.save_final=false",
                        *(SMALL_EKE if small else ()),
                        *(SMALL_LLAMA if small and shape == "llama_1b" else ()),
                    ),
                )


def memory_parts(small: bool) -> Iterator[Part]:
    """The guides' rows, as typed in docs/reference/techniques.md."""
    beside: tuple[str, ...] = ("train.save_final=false", "train.checkpoint_every=null")
    if small:
        beside += (*SMALL_EKE, "data.seq_len=64", "data.num_samples=32", "data.num_eval_samples=8")
    for row in ROWS:
        typed = ("experiment=guide_single_gpu", *row.overrides.split(), *beside)
        yield Part("memory", row.technique, 90, run_eke, typed)


def test_parts(small: bool) -> Iterator[Part]:
    """The files of tests/gpu."""
    del small  # their size is their device's
    for file in sorted((REPO / "tests" / "gpu").glob("test_*.py")):
        path = str(file.relative_to(REPO))
        yield Part("tests", file.stem, 300, run_tests, (path,))


def ranks_parts(small: bool) -> Iterator[Part]:
    """Both loops on all GPUs; small on two ranks of a CPU."""
    count = 2 if small else detect().count
    size, steps = ("tiny", "3") if small else ("8b", "20")
    for way in ("eke", "titan") if count > 1 else ():
        typed = ("--size", size, "--ranks", str(count), "--steps", steps, "--ways", way)
        casts = ("--casts", "per_step") if not small else ()  # as the other loop's
        yield Part("ranks", f"{size} {way}", 540, run_ranks, (*typed, *casts))


def make_parts(small: bool, out: Path) -> list[Part]:
    """Everything, in the order in which it is done."""
    techniques = () if not small else ("precision=fp32", "optimizer=sgd", "memory=checkpointing")
    return [
        *trainer_parts(small),
        *memory_parts(small),
        *ranks_parts(small),
        *test_parts(small),
        Part("techniques", "all", 540, run_techniques, (*techniques, "--out", str(out))),
    ]


STAGES = ("trainer", "memory", "ranks", "tests", "techniques")


def begin(file: Path, small: bool) -> Row:
    """The record so far, or an empty one; other versions begin anew."""
    device = detect()
    fresh: Row = {
        "benchmark": "on_gpu",
        "size": "small" if small else "full",
        "device": "CPU" if device.kind == "cpu" else device.name,
        "devices": device.count,
        "versions": environment()["versions"],
        "parts": {stage: {} for stage in STAGES},
    }
    earlier: Row = json.loads(file.read_text()) if file.exists() else fresh
    return earlier if earlier["versions"] == fresh["versions"] else fresh


def is_done(row: Row | None) -> bool:
    """Whether a part need not be done again; failed tests and out-of-memory are answers."""
    return row is not None and row["outcome"] in ("ok", "failed", "oom")


def main() -> int:
    """Do what is missing; returns 0 when all of it was done, else 75: the same command goes on."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", choices=["full", "small"], default="full")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--budget", type=float, help="seconds for all of it")
    parser.add_argument("--out", type=Path, default=REPO / "results", help="folder of the records")
    parser.add_argument("--patience", type=float, default=1, help="times the limit of each part")
    parser.add_argument("--again", action="store_true", help="also what was done before")
    asked = parser.parse_args()
    small = asked.size == "small"
    if not small and detect().kind != "cuda":
        parser.error("no CUDA device here; --size small runs the script in miniature on a CPU")
    name = f"on_gpu_{short_name(detect())}{'_small' if small else ''}.json"
    writable(parser, asked.out / name)
    record = begin(asked.out / name, small)
    parts = [p for p in make_parts(small, asked.out.absolute()) if p.stage in asked.stages]
    end = time.monotonic() + (asked.budget or float("inf"))
    for part in parts:
        rows = record["parts"].setdefault(part.stage, {})  # a record may be older than a stage
        left = min(asked.patience * part.limit_s, end - time.monotonic())
        if (is_done(rows.get(part.name)) and not asked.again) or left <= 0:
            continue
        start = time.monotonic()
        rows[part.name] = part.do(part, left)
        rows[part.name]["wall_s"] = round(time.monotonic() - start, 1)
        rows[part.name]["time"] = datetime.now(UTC).isoformat(timespec="seconds")
        write_json(asked.out / name, record)
        print(f"{part.stage:10} {part.name:44} {describe(rows[part.name])}", flush=True)
    missing = [p.name for p in parts if not is_done(record["parts"].get(p.stage, {}).get(p.name))]
    print(f"{asked.out / name}: {len(parts) - len(missing)} of {len(parts)} parts done")
    return EXIT_RESUMABLE if missing else 0


def describe(row: Row) -> str:
    """A part's end in a few words."""
    words = [row["outcome"], f"{row['wall_s']} s"]
    if row.get("samples_per_s"):
        words.append(f"{row['samples_per_s']:.2f} samples/s")
    if "passed" in row:
        words.append(f"{row['passed']} passed, {row['skipped']} skipped, {row['failed']} failed")
    return ", ".join([*words, *([row["reason"][:160]] if row.get("reason") else [])])


if __name__ == "__main__":
    sys.exit(main())
