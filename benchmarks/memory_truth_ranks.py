"""Forecasts of runs of two processes against what each of them really took, on a CPU.

python benchmarks/memory_truth_ranks.py [--count N] [--seed N] [--out FILE] [--again]

Small configurations of ddp, FSDP2 and ZeRO-1 to 3, with and without offloading, over five families,
optimizers and precisions, are planned, forecast (formulas alone, and with a trace) and really
trained for two steps by two gloo ranks. Compared: the record's peak of the tensor allocator in the
second step, the first rank's, with the forecast's `allocated`; and the bytes of training state that
the running objects hold with those of `eke.models.sizes`. Nothing is fitted. `--again` trains
nothing: it forecasts the rows of the file anew.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Any

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO / "src"), str(REPO / "tests")]

from arguments import at_least, writable  # noqa: E402  # after the path is there
from memory_truth import COMMON, MODELS  # noqa: E402  # after the path is there
from rank_server import RankServer  # noqa: E402  # after the path is there
from support import environment as of_ranks  # noqa: E402  # after the path is there
from trained_ranks import train_in_ranks  # noqa: E402  # after the path is there

from eke.common.errors import ConfigError  # noqa: E402  # after the path is there
from eke.common.files import write_json  # noqa: E402  # after the path is there
from eke.config.compose import compose  # noqa: E402  # after the path is there
from eke.estimate.memory import Traced, forecast  # noqa: E402  # after the path is there
from eke.estimate.memory.trace_client import trace_all  # noqa: E402  # after the path is there
from eke.hardware import environment  # noqa: E402  # after the path is there
from eke.models.sizes import shared_state_bytes  # noqa: E402  # after the path is there
from eke.plan.planner import Plan  # noqa: E402  # after the path is there
from eke.plan.record import Record  # noqa: E402  # after the path is there
from eke.workflows.planning import plan_for  # noqa: E402  # after the path is there

STRATEGIES = (
    "distributed=ddp", "distributed=fsdp", "distributed=zero1", "distributed=zero2",
    "distributed=zero3", "distributed=ddp", "distributed=fsdp",
    "distributed=zero2 offload=optimizer_cpu", "distributed=zero3 offload=optimizer_cpu",
    "distributed=zero3 offload=params_cpu",
)  # fmt: skip
"""In turns, so that each is seen often enough."""

OPTIMIZERS = ("adamw", "adamw", "adamw_foreach", "adamw_8bit", "sgd", "lion", "adafactor")
PRECISIONS = ("fp32", "fp32", "bf16", "bf16_pure")
TECHNIQUES = ("", "", "", "batch.accumulation=2", "memory=checkpointing", "peft=lora")

Row = dict[str, Any]


def draw(rng: Random, strategy: str, family: str) -> list[str]:
    """Overrides of one configuration, possibly refused."""
    option, tasks = MODELS[family]
    heads, batch = rng.choice((2, 4)), rng.choice((1, 2, 4))
    words = [
        option,
        strategy,
        f"model.hidden_size={heads * rng.choice((32, 48, 64))}",
        f"model.num_attention_heads={heads}",
        f"model.num_hidden_layers={rng.randint(2, 6)}",
        f"model.intermediate_size={rng.choice((128, 300, 512))}",
        f"model.vocab_size={rng.choice((320, 1000, 4096))}",
        "model.dropout=0",
        f"task={rng.choice(tasks)}",
        f"data.seq_len={rng.choice((32, 64, 128))}",
        f"batch.per_device={batch}",
        f"data.num_samples={16 * batch}",
        f"optimizer={rng.choice(OPTIMIZERS)}",
        f"precision={rng.choice(PRECISIONS)}",
        rng.choice(TECHNIQUES),
        *COMMON,
    ]
    if family != "t5":  # which has no table of positions
        words.append("model.max_position_embeddings=256")
    return " ".join(words).split()


def chosen(seed: int, count: int) -> list[tuple[list[str], Plan]]:
    """So many that no rule refuses, strategies and families in turns."""
    rng, found = Random(seed), []
    families = list(MODELS)
    for _ in range(50 * count):  # a strategy that is always refused must end this
        if len(found) == count:
            break
        turn = len(found)
        family = families[(turn + turn // len(STRATEGIES)) % len(families)]
        overrides = draw(rng, STRATEGIES[turn % len(STRATEGIES)], family)
        try:
            found.append((overrides, plan_for(compose(overrides), planning=True)))
        except ConfigError:
            continue
    return found


def state_of(record: Record) -> dict[str, int]:
    """Bytes of the training state that the first rank's objects really held."""
    found = record.effective
    if "deepspeed" in found:
        deepspeed = found["deepspeed"]
        return {k: deepspeed[f"{k}_bytes"] for k in ("optimizer", "weights")}
    if "sharding" in found:
        first: dict[str, int] = found["sharding"]["state_bytes_per_rank"][0]
        return {k: first[k] for k in ("optimizer", "weights", "gradients")}
    return {}


def measured_row(overrides: list[str], record: Record) -> Row:
    """What one configuration really took, in bytes of tensors of the first rank."""
    measured = record.memory.measured
    assert measured is not None
    truth = measured.peak_allocated_bytes
    assert truth is not None
    drawn = [text for text in overrides if text not in COMMON]
    return {
        "overrides": " ".join(drawn),
        "measured": truth,
        "measured_per_rank": measured.peak_per_rank_bytes,
        "state": {name: [0, size] for name, size in state_of(record).items()},
    }


def compared(row: Row, plan: Plan, traced: Traced | None) -> Row:
    """What was measured, and what is forecast; each pair of a state is computed, then found."""
    truth = row["measured"]
    held = shared_state_bytes(plan.config, plan.size, host=True)
    row = {**row, "state": {k: [getattr(held, k), pair[1]] for k, pair in row["state"].items()}}
    better = None if traced is None else forecast(plan, traced)
    for name, found in (("formulas", forecast(plan)), ("traced", better)):
        if found is not None:
            peak = found.allocated
            row[name] = {
                "low": peak.low,
                "expected": peak.expected,
                "high": peak.high,
                "error": round(peak.expected / truth - 1, 5),
                "inside": peak.low <= truth <= peak.high,
            }
    return row


def summarised(rows: list[Row]) -> dict[str, Any]:
    """Errors of expected values and truths outside of bounds; of all, and by strategy."""
    parts: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        words = row["overrides"].split()
        sharing = [w.partition("=")[2] for w in words if w.startswith(("distributed=", "offload="))]
        parts["all"].append(row)
        parts["+".join(sharing)].append(row)
    return {name: _statistics(part) for name, part in sorted(parts.items())}


def _statistics(rows: list[Row]) -> dict[str, Any]:
    found: dict[str, Any] = {"n": len(rows)}
    for name in ("formulas", "traced"):
        known = [row[name] for row in rows if name in row]
        errors = sorted(abs(each["error"]) for each in known)
        if errors:
            found[name] = {
                "n": len(errors),
                "mean": round(statistics.mean(errors), 5),
                "median": round(statistics.median(errors), 5),
                "max": errors[-1],
                "outside": sum(not each["inside"] for each in known),
            }
    states = [pair for row in rows for pair in row["state"].values()]
    found["states"] = {"n": len(states), "exact": sum(a == b for a, b in states)}
    return found


def main() -> int:
    """Predict, train, compare, write down; returns 1 where a truth lies outside of its bounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=at_least(1), default=30)
    parser.add_argument("--seed", type=int, default=22)
    out = REPO / "results" / "memory_truth_ranks_cpu.json"
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument("--again", action="store_true")
    arguments = parser.parse_args()
    writable(parser, arguments.out)
    if arguments.again and not arguments.out.exists():
        parser.error(f"--again is of a file that is there, and {arguments.out} is not")
    rows = again(arguments.out) if arguments.again else trained(arguments)
    for name, part in summarised(rows).items():
        print(name, part)
    return int(
        any(not row[k]["inside"] for row in rows for k in ("formulas", "traced") if k in row)
    )


def trained(arguments: argparse.Namespace) -> list[Row]:
    """Rows of new trainings, written down one by one."""
    cases = chosen(arguments.seed, arguments.count)
    answers = trace_all([plan for _, plan in cases])
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        server = RankServer(scratch)
        try:
            for number, ((overrides, plan), answer) in enumerate(zip(cases, answers, strict=True)):
                runs = scratch / str(number)
                place, record, codes = train_in_ranks(server, plan, runs, of_ranks(scratch))
                if any(codes):
                    sys.exit(f"failed: {' '.join(overrides)}: {place}: {record.failure}")
                rows.append(compared(measured_row(overrides, record), plan, answer.traced))
                print(line_of(rows[-1]), flush=True)
                write(arguments.out, rows, {"seed": arguments.seed, "environment": environment()})
        finally:
            server.close()
    return rows


def again(file: Path) -> list[Row]:
    """The rows of a file with forecasts of now; what was measured, and where, stays."""
    content = json.loads(file.read_text())
    plans = [plan_for(compose([*row["overrides"].split(), *COMMON]), planning=True)
             for row in content["rows"]]  # fmt: skip
    answers = trace_all(plans)
    parts = zip(content["rows"], plans, answers, strict=True)
    rows = [compared(row, plan, answer.traced) for row, plan, answer in parts]
    for row in rows:
        print(line_of(row))
    measured = {name: content[name] for name in ("seed", "environment")}
    write(file, rows, measured | {"forecast_again": environment()["git"]})
    return rows


def write(file: Path, rows: list[Row], about: dict[str, Any]) -> None:
    """Each time: what is interrupted has measured all the same."""
    write_json(file, {**about, "fitted": "nothing", "summary": summarised(rows), "rows": rows})


def line_of(row: Row) -> str:
    """One configuration in a line."""
    words = []
    for name in ("formulas", "traced"):
        if name in row:
            low, high = row[name]["low"] / row["measured"], row[name]["high"] / row["measured"]
            inside = "" if row[name]["inside"] else "OUTSIDE "
            words.append(f"{name} {inside}{row[name]['error']:+7.1%} [{low:.2f}, {high:.2f}]")
    wrong = {k: pair for k, pair in row["state"].items() if pair[0] != pair[1]}
    return f"{'  '.join(words)}  {wrong or 'exact'}  {row['overrides']}"


if __name__ == "__main__":
    sys.exit(main())
