"""The guides' figures as data: texts and numbers where they belong, rows those of the sweeps."""

import math
from dataclasses import asdict

import pytest
import yaml
from reference.published import ROWS

from eke.common.paths import conf_folder
from eke.results.report.published import all_published

TABLES = all_published()
IDS = [table.name for table in TABLES]


@pytest.mark.parametrize("table", TABLES, ids=IDS)
def test_published_table_has_texts_source_and_numbers(table):
    content = asdict(table)
    rows = content.pop("rows")
    assert all(isinstance(text, str) and text for text in content.values())
    assert table.source.startswith("https://")
    assert table.baseline in rows
    for row, figures in rows.items():
        told = [value for value in figures.values() if value is not None]
        assert told, row
        assert all(type(value) in (int, float) and math.isfinite(value) for value in told), row


@pytest.mark.parametrize("table", TABLES, ids=IDS)
def test_published_rows_exist_in_the_sweep(table):
    file = conf_folder() / "sweep" / f"{table.sweep}.yaml"
    known = yaml.safe_load(file.read_text())["sweep"]["rows"]
    assert set(table.rows) <= set(known)


@pytest.mark.parametrize("table", TABLES, ids=IDS)
def test_relative_speeds_match_absolute_speeds(table):
    base = table.rows[table.baseline].samples_per_s
    for row, figures in table.rows.items():
        if figures.diff_frac is not None:
            # printed as whole per cents, sometimes cut instead of rounded
            assert figures.diff_frac == pytest.approx(figures.samples_per_s / base - 1, abs=0.02), (
                row
            )


def test_published_table_matches_the_documentation():
    (table,) = [table for table in TABLES if table.sweep == "guide_table"]
    found = [(figures.samples_per_s, figures.peak_memory_mb) for figures in table.rows.values()]
    assert found == [(row.samples_per_s, row.memory_mb) for row in ROWS]
    for figures in list(table.rows.values())[:-1]:
        # 512 samples; both are rounded to two digits
        assert figures.runtime_s * figures.samples_per_s == pytest.approx(512, rel=2e-3)
