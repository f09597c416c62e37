"""Tables that fit the terminal."""

import pytest

from eke.common.table import Column, render_table

COLUMNS = (
    Column("optimizer", ["adamw", "adafactor"]),
    Column("data.path", [f"/data/{'x' * 60}/a.jsonl", f"/data/{'x' * 60}/b.jsonl"]),
    Column("loss", ["3.5", "13.25"], right=True, rank=1),
    Column("left", ["", ""]),
    Column("ms/step", ["180", "90"], right=True, rank=2),
)


@pytest.mark.parametrize("width", [30, 40, 60, 80, 120, 200])
def test_rows_fit_and_numbers_are_whole(width: int) -> None:
    header, *rows = render_table(COLUMNS, width)
    lines = [line for row in (header, *rows) for line in row.splitlines()]
    assert not [line for line in lines if len(line) > width and len(line.split()) > 1]
    assert ("180" in rows[0]) == ("ms/step" in header)
    assert [row.count("\n") for row in rows] == [int(width < 120)] * 2
    assert f"data.path=/data/{'x' * 60}/b.jsonl" in rows[1] or width >= 120, "below, unbroken"
    assert "left" not in header, "an empty column is not shown"


def test_column_of_highest_rank_is_removed_first() -> None:
    assert "ms/step" in render_table(COLUMNS, 27)[0]
    assert "ms/step" not in (header := render_table(COLUMNS, 26)[0])
    assert "loss" in header
    assert "loss" not in render_table(COLUMNS, 17)[0]


def test_texts_below_a_row_are_named_and_wrapped() -> None:
    columns = [
        Column("memory", ["none", ""]),
        Column("waits", ["for a free device of this host"] * 2),
        Column("kernels", ["fused_linear_cross_entropy"] * 2),
        Column("loss", ["3.5", "13.25"], right=True),
    ]
    assert render_table(columns, 36) == [
        "  memory   loss",
        "  none      3.5\n    waits: for a free device of this\n    host\n"
        "    kernels=fused_linear_cross_entropy",
        "          13.25\n    waits: for a free device of this\n    host\n"
        "    kernels=fused_linear_cross_entropy",
    ]
    assert render_table([Column("configuration", ["a=1 b=2"])], 8)[1].split() == ["a=1", "b=2"]


def test_numbers_are_aligned_to_the_right() -> None:
    assert render_table([COLUMNS[0], COLUMNS[2]], 80) == [
        "  optimizer   loss",
        "  adamw        3.5",
        "  adafactor  13.25",
    ]


def test_wide_signs_count_twice_and_control_characters_are_replaced() -> None:
    rows = render_table([Column("name", ["模型模型", "a\x1b[2Jb\nc"]), Column("n", ["1", "2"])], 80)
    assert rows[1] == "  模型模型  1"
    assert "\x1b" not in rows[2]
    assert render_table([], 80) == []
