"""The card of an exported model: what it was trained from, on what, and what was measured."""

import json
from pathlib import Path

import eke
from eke.files import write_atomic
from eke.paths import RunPaths
from eke.record import Record
from eke.units import format_bytes

CARD = "README.md"
"""What the Hugging Face hub shows of a model (https://huggingface.co/docs/hub/model-cards)."""


def write_cards(paths: RunPaths, record: Record) -> None:
    """Put the card into each export that the run has.

    Raises:
        OSError: it cannot be written.
    """
    for folder in (paths.model, paths.merged):
        if folder.is_dir():
            write_atomic(folder.resolve() / CARD, render_card(record))


def render_card(record: Record) -> str:
    """Markdown, with the metadata that is known; the license is its owner's to say."""
    model, data = record.config.get("model", {}), record.config.get("data", {})
    base = str(model.get("name_or_path") or "")
    on_hub = base and not Path(base).expanduser().exists()
    source = str(data.get("name") or data.get("path") or "")
    adapted = record.choices.get("peft", "none") != "none"
    metadata = {
        "library_name": "peft" if adapted else "transformers",
        **({"base_model": base} if on_hub else {}),
        **({"datasets": [source]} if record.choices.get("data") == "hub" else {}),
    }
    start = f"`{base}`" if base else f"random weights (`model={record.choices.get('model')}`)"
    facts = {
        "Started from": start,
        "Task": record.choices.get("task"),
        "Data": f"{record.choices.get('data')} {source}".strip(),
        "Steps": f"{record.steps_done}, run {record.outcome}",
        **_measured(record),
        "Made by": f"eke {eke.__version__}, run {record.run_id}",
    }
    lines = [f"{key}: {json.dumps(value)}" for key, value in metadata.items()]
    body = [f"- {key}: {value}" for key, value in facts.items() if value]
    return "\n".join(["---", *lines, "---", "", f"# {record.name}", "", *body, ""])


def _measured(record: Record) -> dict[str, str]:
    """Losses in nats per target, speed and memory; what was not measured is absent."""
    memory = record.memory.measured
    peak, speed = memory and memory.peak_allocated_bytes, record.throughput.samples_per_s
    losses = {"Evaluation": record.loss.eval_final, "Training": record.loss.train_final}
    told = {f"{k} loss": f"{v:.4f} nats per target" for k, v in losses.items() if v is not None}
    told |= {"Training speed": f"{speed:.4g} samples/s"} if speed else {}
    told |= {"Peak memory": format_bytes(peak)} if peak else {}
    return told | {"Machine": str(record.machine.get("device", ""))}
