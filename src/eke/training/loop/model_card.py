"""The card of an exported model: what it was trained from, on what, and what was measured."""

import json
from pathlib import Path

import eke
from eke.common.files import write_atomic
from eke.common.paths import RunPaths
from eke.common.units import format_bytes
from eke.plan.record import Record

CARD = "README.md"
"""What the Hugging Face hub shows of a model (https://huggingface.co/docs/hub/model-cards)."""


def write_cards(paths: RunPaths, record: Record) -> None:
    """Put the card into each export that the run has."""
    for folder in (paths.model, paths.merged):
        real = folder.resolve()  # `model` is a link to a checkpoint of this run
        if real.is_dir() and real.is_relative_to(paths.folder.resolve()):
            write_atomic(real / CARD, render_card(record))


def render_card(record: Record) -> str:
    """Markdown below the metadata that is known; the license is for the model's owner to add."""
    model, data = record.config.get("model", {}), record.config.get("data", {})
    choices, memory = record.choices, record.memory.measured
    base, source = model.get("name_or_path"), data.get("name") or data.get("path") or ""
    metadata = {
        "library_name": "transformers" if choices.get("peft", "none") == "none" else "peft",
        "base_model": base if base and not Path(base).expanduser().exists() else None,
        "datasets": [source] if choices.get("data") == "hub" else None,
    }
    facts = {
        "base model": base or f"none: random weights of model={choices.get('model')}",
        "task": choices.get("task"),
        "data": f"{choices.get('data')} {source}",
        "steps": f"{record.steps_done} ({record.outcome})",
        "evaluation loss, nats per target": record.loss.eval_final,
        "training loss, nats per target": record.loss.train_final,
        "samples/s in training": record.throughput.samples_per_s,
        "peak memory": format_bytes(memory.peak_allocated_bytes or 0) if memory else None,
        "machine": record.machine.get("device"),
        "run": f"{record.run_id} of eke {eke.__version__}",
    }
    told = {k: f"{v:.5g}" if isinstance(v, float) else v for k, v in facts.items() if v}
    head = [f"{key}: {json.dumps(value)}" for key, value in metadata.items() if value]
    body = [f"- {key}: {value}" for key, value in told.items()]
    return "\n".join(["---", *head, "---", "", f"# {record.name}", "", *body, ""])
