"""Numbers as people read them."""

import re

import pytest

from eke.common.text import format_bytes, format_count, format_flops, format_seconds, format_value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1024, "1.00 KiB"),
        (1.31 * 2**30, "1.31 GiB"),
        (2**40, "1024.00 GiB"),
        (-(2**20), "-1.00 MiB"),
    ],
)
def test_format_bytes(value, text) -> None:
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.25, "0.25"),
        (999, "999"),
        (1000, "1 k"),
        (999_400, "999 k"),
        (999_600, "1 M"),
        (1.24e9, "1.24 B"),
        (9.999e11, "1 T"),
        (1.2e15, "1.2 P"),
        (3e18, "3 E"),
        (-1500, "-1.5 k"),
    ],
)
def test_format_count(value, text) -> None:
    assert format_count(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (4.21, "4.21 s"),
        (59.94, "59.9 s"),
        (59.96, "1 m 00 s"),
        (192, "3 m 12 s"),
        (3599.4, "59 m 59 s"),
        (3599.6, "1 h 00 m"),
    ],
)
def test_format_seconds(value, text) -> None:
    assert format_seconds(value) == text


DIGITS = (1.0, 1.004, 1.05, 3.6, 5.9994, 5.9996, 9.994, 9.996, 9.9994, 9.99949, 9.9996, 9.99999)


@pytest.mark.parametrize("exponent", range(-6, 20))
def test_numbers_are_printed_without_exponent(exponent) -> None:
    for value in (digits * 10.0**exponent for digits in DIGITS):
        count, duration = format_count(value), format_seconds(value)
        assert re.fullmatch(r"\d{1,3}(\.\d+)?( [kMBTPE])?", count) or value < 1e-3, count
        assert "60 s" not in duration, duration
        assert "e+" not in duration or value > 1e7, duration


@pytest.mark.parametrize(
    ("value", "typed"),
    [(None, "null"), (True, "true"), (False, "false"), (0, "0"), (1e-3, "0.001"), ("a", "a")],
)
def test_values_are_printed_as_overrides(value, typed) -> None:
    assert format_value(value) == typed


@pytest.mark.parametrize(
    ("flops", "text"), [(96.2e9, "96.2 G"), (1.5e12, "1.5 T"), (989e12, "989 T"), (12e6, "12 M")]
)
def test_flops_use_giga_for_billions(flops, text) -> None:
    assert format_flops(flops) == text
