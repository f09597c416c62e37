"""Model card for the Hugging Face hub, from a run's record."""

import json
import re
import shlex
from pathlib import Path

import eke
from eke.common.masking import mask
from eke.common.output import escape
from eke.common.paths import user_path
from eke.common.text import format_bytes
from eke.plan.record import Record

CARD = "README.md"
"""Name of the card's file (https://huggingface.co/docs/hub/model-cards)."""


def _is_of_the_hub(name: str | None) -> bool:
    is_name = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(name or ""), re.ASCII)
    return bool(is_name) and not user_path(str(name)).exists()


def render_card(record: Record, merged: bool = False) -> str:
    """Return the card as Markdown, with all known metadata but the license.

    `merged`: the weights contain the adapters of the run.
    """
    model, data = record.config.get("model", {}), record.config.get("data", {})
    choices, memory, losses = record.choices, record.memory.measured, record.loss
    base, source = model.get("name_or_path"), data.get("name") or data.get("path") or ""
    adapter, software = choices.get("peft", "none"), record.environment.get("versions", {})
    origin = f"random weights of model={choices.get('model')}"
    if base:  # a folder without its place on this machine
        origin = f"{Path(base).name} (a folder)" if Path(base).is_absolute() else base
    metadata = {
        "library_name": "transformers" if merged or adapter == "none" else "peft",
        "base_model": base if _is_of_the_hub(base) else None,
        "datasets": [source] if _is_of_the_hub(data.get("name")) else None,
    }
    facts = {
        "base model": origin,
        "trained": "all weights" if adapter == "none" else f"peft={adapter}",
        "merged": "the adapters are part of the weights" if merged else None,
        "task": choices.get("task"),
        "data": f"{choices.get('data')} {source}",
        "data fingerprint": record.plan.get("data_fingerprint"),
        "steps": f"{record.steps_done} ({record.outcome})",
        "weights": record.best and f"of step {record.best.step}, the best {record.best.metric}",
        "evaluation loss before training, nats per target": losses.eval_start,
        "evaluation loss, nats per target": losses.eval_final,
        **{f"evaluation {name}": value for name, value in record.metrics.items()},
        "training loss, nats per target": losses.train_final,
        "samples/s in training": record.throughput.samples_per_s,
        "peak memory": format_bytes(memory.peak_allocated_bytes or 0) if memory else None,
        "machine": record.machine.get("device"),
        "libraries": ", ".join(f"{name} {version}" for name, version in software.items()),
        "run": f"{record.run_id} of eke {software.get('eke', eke.__version__)}",
        "command": mask(shlex.join(record.command)),
    }
    texts = {k: f"{v:.5g}" if isinstance(v, float) else v for k, v in facts.items() if v}
    head = [f"{key}: {json.dumps(value)}" for key, value in metadata.items() if value]
    body = [f"- {escape(key)}: {escape(str(value))}" for key, value in texts.items()]
    return "\n".join(["---", *head, "---", "", f"# {escape(record.name)}", "", *body, ""])
