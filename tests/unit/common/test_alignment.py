"""Columns of words."""

import pytest

from eke.common.text import align


def test_columns_fit_their_widest_word() -> None:
    rows = [("state", "step", ""), ("ok", "1/20", "here"), ("running", "", "")]
    assert align(rows) == ["state    step", "ok       1/20  here", "running"]


def test_numbers_are_right_aligned() -> None:
    assert align([("a", "10", "x"), ("bcd", "2", "y")], right=[1]) == ["a    10  x", "bcd   2  y"]


def test_row_of_wrong_length_is_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        align([("a", "b"), ("c",)])


def test_table_without_rows_has_no_lines() -> None:
    assert align([]) == []
