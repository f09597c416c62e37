"""Columns of words."""

import pytest

from eke.common.text import align


def test_columns_are_as_wide_as_their_widest_word_and_lines_end_with_a_word() -> None:
    rows = [("state", "step", ""), ("ok", "1/20", "here"), ("running", "", "")]
    assert align(rows) == ["state    step", "ok       1/20  here", "running"]


def test_numbers_end_below_each_other() -> None:
    assert align([("a", "10", "x"), ("bcd", "2", "y")], right=[1]) == ["a    10  x", "bcd   2  y"]


def test_a_row_of_another_length_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="shorter"):
        align([("a", "b"), ("c",)])


def test_of_no_rows_there_are_no_lines() -> None:
    assert align([]) == []
