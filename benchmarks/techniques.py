"""Does every technique run here? `python benchmarks/techniques.py [group=option ...]`.

One short training of a tiny model per option of the technique groups, each by the command a user
would type, in a folder of its own. What ended how, and what the run itself saw of the technique,
goes to results/techniques_DEVICE.json, from which docs/techniques.md says where an option ran.
Options named on the command line replace their rows in that file; the others stay.
"""

import json
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from eke.compose.catalogue import make_catalogue
from eke.hardware import environment

REPO = Path(__file__).resolve().parents[1]

GROUPS = (
    "precision", "optimizer", "memory", "attention", "compile", "kernels", "distributed",
    "offload", "dataloader", "peft", "engine",
)  # fmt: skip

SHORT = (
    "model.hidden_size=64",
    "model.num_attention_heads=4",
    "model.intermediate_size=128",
    "model.num_hidden_layers=2",
    "data=synthetic",
    "data.seq_len=32",
    "data.num_samples=64",
    "data.num_eval_samples=8",
    "batch.per_device=4",
    "train.steps=8",
    "train.log_every=1",
    "train.max_grad_norm=null",
    "tracker=none",
)
"""Seconds, not minutes; some optimizers and in-backward updates take no clipping."""

TOGETHER: dict[str, tuple[str, ...]] = {
    "optimizer=adamw_bf16_sr": ("precision=bf16_pure",),
    "attention=flash2": ("precision=bf16",),
    "attention=flash3": ("precision=bf16",),
    "offload=optimizer_cpu": ("distributed=zero2",),
    "offload=params_cpu": ("distributed=zero3",),
    "offload=nvme": (
        "distributed=zero3",
        "offload.path={folder}/nvme",
        "model.hidden_size=256",  # 1.6 M numbers in matrices: DeepSpeed writes no less than 1 MiB
        "model.intermediate_size=1024",
    ),
    "optimizer=schedule_free": ("schedule=constant",),
}
"""Option -> what it needs beside itself."""

LIMIT_S = 300
"""A tiny run takes seconds, and compiling C++ a minute or two."""


def main(wanted: list[str]) -> None:
    """Run the options and write the file."""
    processes = torch.cuda.device_count() or 2
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    file = REPO / "results" / f"techniques_{device.split()[-1].lower()}.json"
    earlier = json.loads(file.read_text())["outcomes"] if wanted and file.exists() else {}
    outcomes = dict(earlier)
    for group in GROUPS:
        for option in make_catalogue().options[group]:
            command = f"{group}={option}"
            if wanted and command not in wanted:
                continue
            outcomes[command] = run(command, processes)
            print(f"{command:34} {outcomes[command]['outcome']:10} {outcomes[command]['reason']}")
    content = {
        "benchmark": "techniques",
        "device": device,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": environment()["versions"],
        "command": f"python train.py GROUP=OPTION {' '.join(SHORT)}",
        "outcomes": dict(sorted(outcomes.items())),
    }
    file.write_text(json.dumps(content, indent=1) + "\n")
    print(file.relative_to(REPO))


def run(command: str, processes: int) -> dict[str, Any]:
    """One option: how it ended, why where it did not, and what the run saw."""
    with tempfile.TemporaryDirectory() as folder:
        beside = [word.format(folder=folder) for word in TOGETHER.get(command, ())]
        if any(word.startswith("distributed=") for word in (command, *beside)):
            beside += [f"distributed.num_processes={1 if command.endswith('=none') else processes}"]
        typed = [command, *beside]
        chosen = {word.split("=")[0] for word in typed}
        short = [word for word in SHORT if word.split("=")[0] not in chosen]
        done = subprocess.run(
            [sys.executable, str(REPO / "train.py"), *typed, *short, f"paths.runs={folder}/runs"],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        records = [json.loads(f.read_text()) for f in Path(folder).glob("runs/*/record.json")]
    if not records:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        return {"with": beside, "outcome": "refused", "reason": " ".join(lines)[:500]}
    record = records[0]
    failure = record["failure"]["message"] if record.get("failure") else ""
    return {
        "with": beside,
        "outcome": record["outcome"],
        "reason": failure,
        "run_id": record["run_id"],
        "warnings": record["warnings"],
        "effective": record["effective"],
        "eval_loss": record["loss"]["eval_final"] if record.get("loss") else None,
        "peak_allocated_bytes": record["memory"]["measured"]["peak_allocated_bytes"],
    }


if __name__ == "__main__":
    main(sys.argv[1:])
