"""docs/reference/techniques.md and rules.md match the code; `EKE_UPDATE=1` rewrites them."""

import json
import os

import pytest
from reference.cards import TECHNIQUES
from reference.measured import cell, read_measured
from reference.published import ROWS
from reference.rules_page import rules_page
from reference.seen import Seen, describe, observations, read_seen
from reference.techniques import techniques_page
from support import REPO

from eke.config.compose import compose
from eke.config.compose.catalogue import make_catalogue


def compare(name: str, fresh: str) -> None:
    page = REPO / "docs" / "reference" / name
    if os.environ.get("EKE_UPDATE"):
        page.write_text(fresh)
    else:
        assert fresh == page.read_text(), "run EKE_UPDATE=1 pytest tests/conf/test_reference.py"


def test_techniques_page_is_up_to_date() -> None:
    compare("techniques.md", techniques_page(REPO / "results"))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.technique)
def test_guides_rows_are_commands_that_compose(row) -> None:
    compose(["experiment=guide_single_gpu", *row.overrides.split()])


@pytest.mark.slow
def test_rules_page_is_up_to_date(tmp_path) -> None:
    compare("rules.md", rules_page(tmp_path))


def test_every_option_has_been_tried_on_a_cpu() -> None:
    """A new option: `python benchmarks/techniques.py group=option`."""
    (cpu,) = (seen for seen in read_seen(REPO / "results") if seen.device == "CPU")
    catalogue = make_catalogue()
    options = [f"{group}={name}" for group in TECHNIQUES for name in catalogue.options[group]]
    untried = [o for o in options if cpu.row(o).get("outcome") not in ("ok", "refused")]
    assert not untried


PLAIN_ROW = {
    "outcome": "ok",
    "with": [],
    "run_id": "0",
    "without_effect": [],
    "effective": {"layers_recomputed": 0, "matmul_dtypes": ["float32"]},
    "peak_allocated_bytes": 40 * 2**20,
}


def row(**changes: object) -> dict:
    return {**PLAIN_ROW, **changes}


SEEN = [
    Seen(
        "CPU",
        {},
        {
            "precision=fp32": PLAIN_ROW,
            "memory=checkpointing": row(
                effective={"layers_recomputed": 4}, peak_allocated_bytes=30 * 2**20
            ),
            "memory=empty_cache": row(
                without_effect=[{"path": "memory.empty_cache_every", "rule": "needs_gpu"}]
            ),
            "memory=max_savings": row(
                effective={"layers_recomputed": 4},
                without_effect=[{"path": "memory.empty_cache_every", "rule": "needs_gpu"}],
            ),
            "attention=flex": {"outcome": "refused", "rules": ["flex_needs_volta"], "with": []},
            "compile=inductor": {"outcome": "timeout", "reason": "not done after 9 s", "with": []},
        },
    ),
    Seen("NVIDIA H200", {}, {"precision=fp32": PLAIN_ROW, "attention=flex": PLAIN_ROW}),
]


@pytest.mark.parametrize(
    ("command", "said", "lines"),
    [
        ("precision=fp32", "ran on CPU, NVIDIA H200", []),
        (
            "memory=checkpointing",
            "ran on CPU",
            [
                "- **On CPU** 4 layers recomputed; peak of tensors 30.0 MiB, of the plain run "
                "40.0 MiB"
            ],
        ),
        (
            "memory=empty_cache",
            "ran on CPU (without effect there)",
            ["- **On CPU** without effect there: [needs gpu](rules.md#needs-gpu)"],
        ),
        (
            "memory=max_savings",
            "ran on CPU",
            [
                "- **On CPU** 4 layers recomputed; without effect there: "
                "[needs gpu](rules.md#needs-gpu)"
            ],
        ),
        (
            "attention=flex",
            "ran on NVIDIA H200",
            ["- **On CPU** refused: [flex needs volta](rules.md#flex-needs-volta)"],
        ),
        (
            "compile=inductor",
            "never seen running",
            ["- **On CPU** timeout: not done after 9 s"],
        ),
        ("peft=lora", "never seen running", []),
    ],
)
def test_description_of_an_option_matches_its_rows(command, said, lines) -> None:
    assert describe(command, SEEN) == said
    assert observations(command, SEEN) == lines


def test_only_full_size_measurements_are_compared_with_guides(tmp_path) -> None:
    full = {
        "outcome": "ok",
        "samples_per_s": 20.123,
        "shared_device": False,
        "stages": {"training": 14949 * 2**20},
    }
    for size in ("small", "full"):
        content = {"size": size, "device": size, "parts": {"memory": {"none": full}}}
        (tmp_path / f"on_gpu_{size}.json").write_text(json.dumps(content))
    (measured,) = read_measured(tmp_path)
    assert (measured.device, cell(measured.rows["none"])) == ("full", "20.12/s, 14949 MB")
    assert cell({**full, "shared_device": True}) == "14949 MB", "others used it: no speed claim"
    assert cell({"outcome": "oom"}) == "oom"
    assert cell(None) == "not measured"
