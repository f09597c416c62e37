"""The guides' figures as data: they fit the sweeps, and a file with a mistake says which."""

import pytest
import yaml
from reference.published import ROWS

from eke.common.errors import EkeError
from eke.common.paths import conf_folder
from eke.results.report.published import all_published, published_for, read_table

TABLES = all_published()
IDS = [table.name for table in TABLES]

GOOD = {
    "title": "a table",
    "source": "https://example.org/table",
    "hardware": "one GPU",
    "date": "2022",
    "sweep": "guide_table",
    "baseline": "plain",
    "notes": "none",
    "rows": {"plain": {"samples_per_s": 2}, "fast": {"samples_per_s": 3.5, "diff_frac": 0.75}},
}


@pytest.mark.parametrize("table", TABLES, ids=IDS)
def test_rows_are_those_of_the_sweep(table) -> None:
    file = conf_folder() / "sweep" / f"{table.sweep}.yaml"
    known = yaml.safe_load(file.read_text())["sweep"]["rows"]
    assert set(table.rows) <= set(known)
    assert table in published_for(table.sweep)


@pytest.mark.parametrize("table", TABLES, ids=IDS)
def test_relative_speeds_agree_with_the_speeds(table) -> None:
    base = table.rows[table.baseline].samples_per_s
    for row, figures in table.rows.items():
        if figures.diff_frac is not None:
            # printed as whole per cents, sometimes cut instead of rounded
            assert figures.diff_frac == pytest.approx(figures.samples_per_s / base - 1, abs=0.02), (
                row
            )


def test_the_guides_table_is_the_one_that_the_documentation_shows() -> None:
    (table,) = published_for("guide_table")
    found = [(figures.samples_per_s, figures.peak_memory_mb) for figures in table.rows.values()]
    assert found == [(row.samples_per_s, row.memory_mb) for row in ROWS]
    for figures in list(table.rows.values())[:-1]:
        # 512 samples; both are rounded to two digits
        assert figures.runtime_s * figures.samples_per_s == pytest.approx(512, rel=2e-3)


def test_a_sweep_that_nobody_has_published_on() -> None:
    assert published_for("") == ()
    assert published_for("demo") == ()


def test_a_file_is_read_as_it_is(tmp_path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(GOOD))
    table = read_table(file)
    assert (table.name, table.baseline, list(table.rows)) == ("mine", "plain", ["fast", "plain"])
    assert table.rows["fast"].samples_per_s == 3.5
    assert table.rows["fast"].peak_memory_mb is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"author": "me"}, "author is unknown"),
        ({"hardware": None}, "hardware is None; a text is wanted"),
        ({"date": 2022}, "date is 2022; a text is wanted"),
        ({"source": "a book"}, "a URL is wanted"),
        ({"baseline": "slow"}, "baseline is 'slow', of which rows has nothing"),
        ({"rows": ["plain"]}, "rows is no mapping"),
        ({"rows": {"plain": {}}}, "rows.plain has no figures"),
        ({"rows": {"plain": {"samples": 2}}}, "rows.plain.samples is unknown; known: diff_frac"),
        ({"rows": {"plain": {"runtime_s": "57 s"}}}, "rows.plain.runtime_s is '57 s'"),
        ({"rows": {"plain": {"runtime_s": True}}}, "a number is wanted"),
        ({"rows": {"plain": {"runtime_s": float("nan")}}}, "a number is wanted"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_mistake_in_a_file(change, said, tmp_path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({**GOOD, **change}))
    with pytest.raises(EkeError, match=r"mine\.yaml: ") as caught:
        read_table(file)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1, 2]", "is no mapping"),
        ("rows: {", "cannot be read"),
        ("rows: {a: {runtime_s: 1}}", "baseline is missing"),
    ],
    ids=["list", "broken", "incomplete"],
)
def test_a_file_that_is_no_table(text, said, tmp_path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(EkeError) as caught:
        read_table(file)
    assert said in str(caught.value)
    with pytest.raises(EkeError, match="cannot be read"):
        read_table(tmp_path / "nothing.yaml")
