"""The model card in an export."""

import json

import pytest
from unit.results.report.made import Run, make_record

from eke.common.paths import RunPaths
from eke.results.card import CARD, render_card
from eke.training.loop.results import write_card


@pytest.fixture
def record(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = make_record("ab12", Run(speed=12.345, loss=1.5, peak=3 * 2**20))
    made.config["model"]["name_or_path"] = "org/base"
    made.config["data"] = {"option": "hub", "name": "imdb"}
    made.choices |= {"model": "pretrained", "data": "hub"}
    return made


def metadata(card: str) -> dict[str, object]:
    """YAML's keys, whose values are JSON."""
    _, head, _ = card.split("---\n")
    pairs = (line.split(": ", 1) for line in head.splitlines())
    return {key: json.loads(value) for key, value in pairs}


def test_card_lists_sources_and_measurements(record) -> None:
    card = render_card(record)
    assert metadata(card) == {
        "library_name": "transformers", "base_model": "org/base", "datasets": ["imdb"]
    }  # fmt: skip
    for told in ("causal_lm", "hub imdb", ": 1.5", ": 12.345", "samples/s", "3.00 MiB", "ab12"):
        assert told in card
    assert "license" not in card.lower()
    record.config["data"]["option"] = record.choices["data"] = "chat_hub"
    assert metadata(render_card(record))["datasets"] == ["imdb"]


def test_local_paths_are_excluded_from_card_metadata(record, tmp_path) -> None:
    record.config["model"]["name_or_path"] = str(tmp_path)
    record.config["data"] = {"option": "chat_hub", "name": str(tmp_path)}
    record.choices |= {"data": "chat_hub", "peft": "lora"}
    record.throughput.samples_per_s = None
    card = render_card(record)
    assert metadata(card) == {"library_name": "peft"}
    assert "samples/s" not in card


def test_every_export_has_a_card(record, tmp_path) -> None:
    paths = RunPaths(tmp_path)
    write_card(paths, record)
    assert not list(tmp_path.rglob(CARD))
    export = paths.checkpoints / "step-00000004" / "model"
    export.mkdir(parents=True)
    paths.model.symlink_to(export.relative_to(tmp_path))
    write_card(paths, record)
    assert (export / CARD).read_text() == render_card(record)
    assert paths.model.is_symlink()
