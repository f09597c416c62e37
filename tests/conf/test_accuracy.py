"""The tables of notes/accuracy.md match the records in results/."""

import json
import os
import re

from reference.accuracy import ABSENT, accuracy_page, percent
from support import REPO

PAGE = REPO / "notes" / "accuracy.md"
PATTERN = re.compile(r"<!-- accuracy -->.*?<!-- /accuracy -->", re.DOTALL)


def test_accuracy_tables_match_records() -> None:
    text = PAGE.read_text()
    assert PATTERN.search(text)
    block = f"<!-- accuracy -->\n{accuracy_page(REPO / 'results')}\n<!-- /accuracy -->"
    fresh = PATTERN.sub(lambda _: block, text)
    if os.environ.get("EKE_UPDATE"):
        PAGE.write_text(fresh)
    else:
        assert fresh == text, "run EKE_UPDATE=1 pytest tests/conf/test_accuracy.py"


def test_missing_record_leaves_accuracy_tables_empty(tmp_path) -> None:
    rows = [row for row in accuracy_page(tmp_path).splitlines() if not row.startswith("| ---")]
    heads = [row for row in rows if row and ABSENT not in row]
    published = [row for row in heads if re.match(r"\| (torchtitan|8|128|of this)\b", row)]
    assert len(heads) - len(published) == 4, "four tables, and nothing said but their heads"


def test_torchtitan_peaks_are_in_the_expected_range() -> None:
    """16 bytes x 8.03 G parameters x (1/8 - 1/128) are 14.0 GiB."""
    rows = [row.split(" | ") for row in accuracy_page(REPO / "results").splitlines()]
    found = {row[0]: row[1:] for row in rows}
    assert found["| of this the sharded state"][1] == "14.0"
    for count in (8, 128):
        assert abs(float(found[f"| {count}, compiled"][2].split()[0])) < 3
    assert abs(float(found["| 8 less 128, compiled"][1]) - 15.0) < 1


def test_gpu_record_adds_a_row(tmp_path) -> None:
    part = {"n": 64, "mean": 0.0123, "p95": 0.031, "max": 0.05, "false_fits_frac": 0}
    content = {"summary": {"reserved": part}, "rows": []}
    (tmp_path / "memory_on_gpu_nvidia_h200.json").write_text(json.dumps(content))
    page = accuracy_page(tmp_path)
    assert "reserved, of 64: mean 1.2 %, 95th percentile 3.1 %, largest 5.0 %" in page
    assert "what a GPU reserves" not in page


def test_percentages_have_significant_digits() -> None:
    found = [percent(x) for x in (0.000039, 0.00086, 0.028, 0.227, 1.5051)]
    assert found == ["0.004 %", "0.09 %", "2.8 %", "23 %", "151 %"]
