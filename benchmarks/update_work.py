"""Count what each optimizer does to a number and to a tensor in one step: bytes moved, launches.

python benchmarks/update_work.py [--out FILE]

Writes src/eke/estimate/time/counted_updates.json, which the time model reads. As
benchmarks/step_work.py: the run's own builders on tensors without data, nothing is timed. Two
depths of a small BERT give launches per tensor and bytes per number; what two depths have in common
is launched once a step.
"""

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO / "tests"))

from arguments import as_table, writable  # noqa: E402  # after the path is there
from counted_work import Count, counted  # noqa: E402  # a helper of the tests
from unit.plan.cases import GPU, plan_of  # noqa: E402

from eke.estimate.time.memory_traffic import Contents  # noqa: E402

OPTIONS = (
    "adamw_forloop", "adamw_foreach", "adamw_fused", "adamw_bf16_sr", "adamw_8bit",
    "adamw_torchao_8bit", "adamw_torchao_4bit", "adafactor", "lion", "lion_8bit", "sgd", "muon",
    "schedule_free", "apollo", "galore",
)  # fmt: skip
WIDTHS = {"wide": "fp32", "narrow": "bf16_pure"}


def main() -> int:
    """Count and write; returns 1 where an optimizer could not be counted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    out = REPO / "src/eke/estimate/time/counted_updates.json"
    parser.add_argument("--out", type=Path, default=out)
    arguments = parser.parse_args()
    writable(parser, arguments.out)
    warnings.simplefilter("ignore")
    content: dict[str, Any] = {"clip": clipping()}
    print("clip", content["clip"], flush=True)
    missing = 0
    for option in OPTIONS:
        for width, precision in WIDTHS.items():
            try:
                found = per_unit(option, precision, "null")
            except Exception as error:  # whatever a library cannot do without data
                print(option, width, f"not counted: {type(error).__name__}: {str(error)[:80]}")
                missing += 1
                continue
            content[f"{option}/{width}"] = found
            print(option, width, found, flush=True)
    arguments.out.write_text(as_table(content) + "\n")
    return int(missing > 0)


def clipping() -> dict[str, float]:
    """What the gradients' norm and clipping add."""
    plain, clipped = per_unit("sgd", "fp32", "null"), per_unit("sgd", "fp32", "1.0")
    return {name: round(clipped[name] - plain[name], 3) for name in plain}


def per_unit(option: str, precision: str, clip: str) -> dict[str, float]:
    """Bytes per number, launches per tensor, launches per step."""
    (small, few), (large, many) = (step_of(option, precision, clip, depth) for depth in (2, 6))
    tensors = many.trained_tensors - few.trained_tensors
    each = (large.launches - small.launches) / tensors
    moved = (large.moved - small.moved) / (many.trained - few.trained)
    once = small.launches - each * few.trained_tensors
    return {"bytes": round(moved, 3), "each": round(each, 3), "launches": round(max(0.0, once), 3)}


def step_of(option: str, precision: str, clip: str, depth: int) -> tuple[Count, Any]:
    """What one optimizer step does, and the model's contents."""
    overrides = ["model=tiny_bert", "task=masked_lm", f"optimizer={option}",
                 f"precision={precision}", f"train.max_grad_norm={clip}", "data=synthetic",
                 "data.seq_len=16", "batch.per_device=2", "batch.accumulation=1",
                 "model.hidden_size=256", "model.intermediate_size=1024",
                 "model.num_attention_heads=4", f"model.num_hidden_layers={depth}"]  # fmt: skip
    if option == "schedule_free":
        overrides.append("schedule=constant")
    plan = plan_of(*overrides, device=GPU)
    return counted(plan)["optimizer"], Contents(plan.config)


if __name__ == "__main__":
    sys.exit(main())
