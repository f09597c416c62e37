"""How fast do large GPT models train? The time model against 209 speeds that MosaicML published.

python benchmarks/llm_foundry.py [--out FILE]

Half of the rows of one machine, drawn with seed 26, fit four numbers: the shares of the datasheet's
peak that matrix multiplications and fused attention reach on A100 and on H100 (CLASSES in
src/eke/estimate/time/rates.py has them, rounded). The other half, and all rows of several machines,
are predicted. MPT is composed as a GPT-2 of its sizes whose GELU is one kernel, with FSDP, in
bfloat16: its layers move no more bytes. Prints, and writes a summary.
"""

import argparse
import copy
import csv
import json
import logging
import math
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from arguments import writable
from step_time import line_of, summarised

from eke.common.files import write_atomic
from eke.config.compose import compose
from eke.estimate.time import flops as passes
from eke.estimate.time.flops import Work
from eke.estimate.time.rates import StepTime
from eke.estimate.time.time_history import calibrated_step_time
from eke.hardware import DEVICES
from eke.plan.planner import Plan
from eke.workflows.planning import plan_for

REPO = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_name("llm_foundry.tsv")

SIZES = {
    "125m": (768, 12, 12), "350m": (1024, 16, 24), "760m": (1536, 12, 24),
    "1b": (2048, 16, 24), "3b": (2560, 20, 32), "7b": (4096, 32, 32),
    "13b": (5120, 40, 40), "30b": (7168, 56, 48), "70b": (8192, 64, 80),
}  # fmt: skip
"""Model -> hidden size, heads and layers (scripts/train/yamls/pretrain/mpt-*.yaml)."""

SEED = 26
PER_MACHINE = 8

LENGTHS = {"512": (0, 512), "1024 to 4096": (513, 4096), "8192 and more": (4097, 1 << 20)}


@dataclass(frozen=True)
class Row:
    """One published speed."""

    name: str
    plan: Plan
    measured: float
    """Seconds of a step."""

    @property
    def length(self) -> int:
        """Tokens of each row."""
        return self.plan.config.data.seq_len

    @property
    def generation(self) -> tuple[int, int]:
        """Compute capability."""
        assert self.plan.device.capability is not None
        return self.plan.device.capability


def main() -> int:
    """Fit, compare, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    out = writable(parser, arguments.out or REPO / "results" / "step_time_foundry.json")
    counted = {**passes.counts("counted"), "gpt2": with_one_gelu_kernel()}
    passes.counts = lambda name: counted
    rows = [row_of(row) for row in table()]
    alone, several = [[r for r in rows if one_machine(r) is wanted] for wanted in (True, False)]
    order = list(range(len(alone)))
    Random(SEED).shuffle(order)
    known, held = ([alone[i] for i in part] for part in halves(order))
    fitted = {
        DEVICES[option].name: fit([r for r in known if r.generation == DEVICES[option].capability])
        for option in ("a100_80", "h100")
    }
    groups = {"fitted": known, "held out": held, "several machines": several}
    groups |= {
        f"held out, rows of {name} tokens": [r for r in held if least <= r.length <= most]
        for name, (least, most) in LENGTHS.items()
    }
    groups["held out, 7B on H100"] = [r for r in held if "h100 7b" in r.name]
    summary = {name: summarised([compared(r) for r in found]) for name, found in groups.items()}
    lines = [line_of(compared(row)) for row in rows]
    print("\n".join(lines))
    content = {"seed": SEED, "fitted": fitted, "summary": summary, "rows": lines}
    print(json.dumps({key: content[key] for key in ("fitted", "summary")}, indent=1))
    write_atomic(out, json.dumps(content, indent=1) + "\n")
    return 0


def halves(order: list[int]) -> tuple[list[int], list[int]]:
    """The first half and the rest."""
    return order[: len(order) // 2], order[len(order) // 2 :]


def one_machine(row: Row) -> bool:
    """Whether no network is used."""
    return row.plan.config.distributed.num_nodes == 1


def with_one_gelu_kernel() -> dict[str, Any]:
    """What was counted of GPT-2, whose GELU is eight kernels: MPT's is torch's, as BERT's."""
    counted = passes.counts("counted")
    gpt2 = copy.deepcopy(counted["gpt2"])
    for key, entry in gpt2.items():
        for phase in ("forward", "backward"):
            entry["layer"][phase]["inner"] = counted["bert"][key]["layer"][phase]["inner"]
    return gpt2


def table() -> list[dict[str, str]]:
    """All published rows."""
    with TABLE.open() as file:
        lines = (line for line in file if not line.startswith("#"))
        return list(csv.DictReader(lines, delimiter="\t"))


def name_of(row: dict[str, str]) -> str:
    """What tells a row from the others."""
    return " ".join(row[key] for key in ("hardware", "model", "seq_len", "gpus", "micro_batch"))


def row_of(row: dict[str, str]) -> Row:
    """One of them, planned."""
    plan = planned(row)
    tokens = plan.batch.samples_per_step * plan.config.data.seq_len
    return Row(name_of(row), plan, tokens / plan.batch.world_size / float(row["tokens_per_s"]))


def planned(row: dict[str, str]) -> Plan:
    """Of one row, for its machines."""
    hidden, heads, layers = SIZES[row["model"]]
    gpus = int(row["gpus"])
    typed = [
        "model=gpt2", f"model.hidden_size={hidden}", f"model.num_attention_heads={heads}",
        f"model.num_hidden_layers={layers}", f"model.intermediate_size={4 * hidden}",
        "model.vocab_size=50368", f"model.max_position_embeddings={row['seq_len']}",
        "model.dropout=0", "data=synthetic", f"data.seq_len={row['seq_len']}",
        "data.num_samples=100000", f"batch.per_device={row['micro_batch']}",
        f"batch.accumulation={row['accumulation']}", "precision=bf16_pure", "compile=none",
        "attention=sdpa", "distributed=fsdp", f"distributed.num_processes={gpus}",
        f"distributed.num_nodes={-(-gpus // PER_MACHINE)}", f"hardware={row['hardware']}",
        "plan_only=true", "tracker=none", "ignore_forecast=true",
    ]  # fmt: skip
    typed += ["memory=checkpointing"] if row["checkpointing"] == "yes" else []
    device = replace(DEVICES[row["hardware"]], count=PER_MACHINE)
    return plan_for(compose(typed), planning=True, target=(device, "as published", 1))


def fit(rows: Sequence[Row]) -> dict[str, float]:
    """Shares of the peak in products and in attention with the least squares of log errors."""
    from scipy.optimize import least_squares

    fixed = []
    for row in rows:
        found, work = calibrated_step_time(row.plan), Work(row.plan)
        assert isinstance(found, StepTime)
        parts = [sum(p.flops for p in work.products if p.fused is fused) for fused in (False, True)]
        peak = row.plan.device.peak("bfloat16")
        assert peak
        rest = found.step_s.expected - found.parts["compute"]
        fixed.append((parts[0] / peak, parts[1] / peak, rest, row.measured))

    def errors(shares: Sequence[float]) -> list[float]:
        return [math.log((a / shares[0] + b / shares[1] + c) / d) for a, b, c, d in fixed]

    best = least_squares(errors, [0.6, 0.3]).x
    return {"products": round(float(best[0]), 3), "attention": round(float(best[1]), 3)}


def compared(row: Row) -> dict[str, Any]:
    """Prediction and truth of one row."""
    found = calibrated_step_time(row.plan)
    assert isinstance(found, StepTime)
    step = found.step_s
    return {"table": "", "row": row.name, "low": step.low, "expected": step.expected,
            "high": step.high, "measured": row.measured}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
