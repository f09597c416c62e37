"""Does every technique run here, and what did its run see of it?

python benchmarks/techniques.py [--again] [--limit S] [--budget S] [group=option ...]

One short training of a small model per option of the technique groups, each by the command a user
would type, in a folder of its own. How it ended and what the run saw goes to
results/techniques_DEVICE.json after each option; docs/reference/techniques.md is made from that
file.

Resumable: an option with a row of the same versions and the same command is left alone, unless it
is named or `--again` is given. A file of other versions or another command is begun anew, so that
all its rows can be compared.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from arguments import writable

from eke.common.errors import ConfigError
from eke.common.files import json_safe, write_atomic
from eke.config.compose import compose
from eke.config.compose.catalogue import make_catalogue
from eke.hardware import Device, detect, device_option, environment
from eke.plan.planner import Plan
from eke.plan.record import EXIT_RESUMABLE
from eke.rules import RULES, RuleInputs, Severity, check
from eke.workflows.planning import plan_for

REPO = Path(__file__).resolve().parents[1]

GROUPS = (
    "precision", "optimizer", "memory", "attention", "compile", "kernels", "distributed",
    "offload", "dataloader", "peft", "engine",
)  # fmt: skip

SHORT = (
    "data=synthetic",
    "data.seq_len=128",
    "data.num_samples=64",
    "data.num_eval_samples=8",
    "batch.per_device=4",
    "train.steps=8",
    "train.log_every=1",
    "train.max_grad_norm=null",
    "tracker=none",
)
"""eke's default model, 4 layers 128 wide: large enough that states and activations outweigh what
every run has, and still seconds. Some optimizers and updates in backward take no clipping."""

TOGETHER: dict[str, tuple[str, ...]] = {
    "optimizer=adamw_bf16_sr": ("precision=bf16_pure",),
    "attention=flash2": ("precision=bf16",),
    "attention=flash3": ("precision=bf16",),
    # torch's Adam on the host: DeepSpeed's own takes minutes to compile at its first use.
    "offload=optimizer_cpu": ("distributed=zero2", "optimizer=adamw_fused"),
    "offload=params_cpu": ("distributed=zero3",),
    "offload=nvme": (
        "distributed=zero3",
        "offload.path={folder}/nvme",
        "model.hidden_size=256",  # 1.6 M numbers in matrices: DeepSpeed writes no less than 1 MiB
        "model.intermediate_size=1024",
    ),
    "kernels=sparse_prediction": ("model=tiny_bert", "task=masked_lm"),
    "optimizer=schedule_free": ("schedule=constant",),
}
"""Option -> what it needs beside itself."""

Row = dict[str, Any]


def main() -> int:
    """Run the options that have no row yet; returns 75 when the budget ended before they did."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("options", nargs="*", metavar="group=option", help="only these")
    parser.add_argument("--again", action="store_true", help="also what has a row already")
    parser.add_argument("--limit", type=float, default=300, help="seconds one option may take")
    parser.add_argument("--budget", type=float, help="start nothing after this many seconds")
    parser.add_argument("--out", type=Path, default=REPO / "results", help="folder of the file")
    asked = parser.parse_args()
    known = [f"{g}={option}" for g in GROUPS for option in make_catalogue().options[g]]
    if unknown := sorted(set(asked.options) - set(known)):
        parser.error(f"not an option of a technique: {' '.join(unknown)}")
    device, started = detect(), time.monotonic()
    file = writable(parser, asked.out / f"techniques_{short_name(device)}.json")
    content = begin(file, device)
    for command in asked.options or known:
        if command in content["outcomes"] and not (asked.again or asked.options):
            continue
        if asked.budget and time.monotonic() - started > asked.budget:
            print(f"the budget of {asked.budget:.0f} s is spent; the same command continues")
            return EXIT_RESUMABLE
        row = run(command, device, content["outcomes"], asked.limit)
        content["outcomes"][command] = json_safe(row)
        write(file, content)
        print(f"{command:34} {row['outcome']:8} {row['reason'][:100]}", flush=True)
    print(file)
    return 0


def short_name(device: Device) -> str:
    """`cpu`, or a GPU's option or name: `h200`."""
    if device.kind == "cpu":
        return "cpu"
    return device_option(device.name) or device.name.lower().replace(" ", "_")


def begin(file: Path, device: Device) -> dict[str, Any]:
    """The file as it is, or an empty one where its rows could not be compared with new ones."""
    fresh: dict[str, Any] = {
        "benchmark": "techniques",
        "device": "CPU" if device.kind == "cpu" else device.name,
        "versions": environment()["versions"],
        "command": f"python train.py GROUP=OPTION {' '.join(SHORT)}",
        "outcomes": {},
    }
    if not file.exists():
        return fresh
    earlier: dict[str, Any] = json.loads(file.read_text())
    changed = [key for key in ("versions", "command") if earlier[key] != fresh[key]]
    if changed:
        print(f"{file.name} has other {' and '.join(changed)}: begun anew")
    return fresh if changed else earlier


def write(file: Path, content: dict[str, Any]) -> None:
    """One row per line: what changed is seen in a diff."""
    head = {key: value for key, value in content.items() if key != "outcomes"}
    rows = sorted(content["outcomes"].items())
    lines = ",\n".join(f"  {json.dumps(command)}: {json.dumps(row)}" for command, row in rows)
    text = json.dumps(head, indent=1)[:-2] + f',\n "outcomes": {{\n{lines}\n }}\n}}\n'
    assert json.loads(text) == content
    write_atomic(file, text)


def run(command: str, device: Device, rows: dict[str, Row], limit_s: float) -> Row:
    """One option: how it ended, why where it did not, and what the run saw."""
    with tempfile.TemporaryDirectory() as folder:
        typed, beside = overrides(command, device, folder)
        row: Row = {"with": beside, "time": datetime.now(UTC).isoformat(timespec="seconds")}
        try:
            plan = plan_for(compose([*typed, f"paths.runs={folder}/runs"]), planning=False)
        except ConfigError as error:
            rules = [problem.id for problem in error.problems]
            return {**row, "outcome": "refused", "reason": error.short(), "rules": rules}
        row["without_effect"] = without_effect(plan)
        for other in rows.values():  # `memory=none` and `compile=none` are the same run
            if other.get("run_id") == plan.run_id and other["outcome"] == "ok":
                return {**other, "with": beside}
        # One that takes too long is ended, and what it would save is thrown away.
        beside_all = ("train.save_on_signal=false", f"paths.runs={folder}/runs")
        return {**row, **train([*typed, *beside_all], Path(folder), limit_s)}


def without_effect(plan: Plan) -> list[dict[str, str]]:
    """What the rules know to do nothing on this device."""
    idle = {rule.id for rule in RULES if rule.verdict is Severity.no_effect}
    _, warned = check(RuleInputs(plan.config, plan.device))
    return [{"path": p.key, "rule": p.id} for p in warned if p.id in idle]


def overrides(command: str, device: Device, folder: str) -> tuple[list[str], list[str]]:
    """The whole command, and what of it the option needs beside itself."""
    beside = [word.format(folder=folder) for word in TOGETHER.get(command, ())]
    together = [command, *beside]
    if any(w.startswith("distributed=") and not w.endswith("=none") for w in together):
        processes = 2 if device.kind == "cpu" else device.count
        beside.append(f"distributed.num_processes={processes}")
    chosen = {word.split("=")[0] for word in (command, *beside)}
    short = [word for word in SHORT if word.split("=")[0] not in chosen]
    return [command, *beside, *short], [word.replace(folder, "FOLDER") for word in beside]


def with_sources() -> dict[str, str]:
    """Environment of a process that runs this repository's sources, before what is installed."""
    path = os.pathsep.join([str(REPO / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}


def train(typed: Sequence[str], folder: Path, limit_s: float) -> Row:
    """Type the command in a fresh process, and read the record it left."""
    process = subprocess.Popen(
        [sys.executable, str(REPO / "train.py"), *typed],
        cwd=folder,
        env=with_sources(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        end(process)
        return {"outcome": "timeout", "reason": f"not done after {limit_s:.0f} s"}
    files = list(folder.glob("runs/*/record.json"))
    if not files:
        return {"outcome": "crashed", "reason": " ".join(output.split())[-500:]}
    record = json.loads(files[0].read_text())
    return {
        "outcome": record["outcome"],
        "reason": record["failure"]["message"] if record.get("failure") else "",
        "run_id": record["run_id"],
        "warnings": record["warnings"],
        "effective": record["effective"],
        "eval_loss": record["loss"]["eval_final"] if record.get("loss") else None,
        "peak_allocated_bytes": record["memory"]["measured"]["peak_allocated_bytes"],
    }


def end(process: "subprocess.Popen[str]", patience_s: float = 15.0) -> None:
    """Ask a run to stop at its next step, then at once; what hears neither is killed."""
    for ask in (process.terminate, process.terminate, process.kill):
        ask()
        try:
            process.communicate(timeout=patience_s)
            return
        except subprocess.TimeoutExpired:
            continue


if __name__ == "__main__":
    sys.exit(main())
