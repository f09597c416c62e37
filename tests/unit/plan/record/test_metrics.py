"""metrics.jsonl: every complete row survives, a torn one is counted, the highest attempt counts."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.plan.record.samples import step_row

from eke.common.files import terminate_last_line
from eke.plan.record import metrics

numbers = st.one_of(st.integers(-(2**53), 2**53), st.floats(allow_nan=False))
rows_strategy = st.lists(st.dictionaries(st.text(max_size=8), numbers, max_size=4), max_size=5)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_missing_file_has_no_rows(path) -> None:
    assert metrics.read_rows(path) == ([], 0)


def test_appending_no_rows_creates_no_file(path) -> None:
    metrics.append_rows(path, [])
    assert not path.exists()


@pytest.mark.slow
@settings(deadline=None)
@given(first=rows_strategy, second=rows_strategy)
def test_rows_round_trip(first, second, tmp_path_factory) -> None:
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    metrics.append_rows(path, first)
    metrics.append_rows(path, second)
    assert metrics.read_rows(path) == (first + second, 0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_non_finite_numbers_survive_json(value, path) -> None:
    metrics.append_rows(path, [{metrics.STEP: 1, metrics.LOSS: value}])
    assert f'"{value}"' in path.read_text(), "strict JSON has only text for it"
    (row,), _ = metrics.read_rows(path)
    assert row[metrics.LOSS] == pytest.approx(value, nan_ok=True)
    assert isinstance(row[metrics.LOSS], float)


@pytest.mark.parametrize(
    "torn",
    [
        b'{"train/loss": 1',
        b"[1, 2]",
        b"3",
        b"null",
        b"\xff\xfe{",
        b'{"a": "\xc3',
        b'{"train/global_step": null, "train/loss": 1}',
        b'{"train/global_step": "2"}',
        b'{"train/global_step": 2, "train/step_time_s": [1]}',
    ],
    ids=["half", "list", "number", "null", "bytes", "half a letter", "no step", "a text", "lists"],
)
def test_invalid_row_is_counted_and_skipped(torn, path) -> None:
    metrics.append_rows(path, [step_row(1)])
    with open(path, "ab") as file:
        file.write(torn + b"\n")
    metrics.append_rows(path, [step_row(2)])
    rows, unreadable = metrics.read_rows(path)
    assert [row[metrics.STEP] for row in rows] == [1, 2]
    assert unreadable == 1


def test_truncation_loses_only_the_last_row(path) -> None:
    metrics.append_rows(path, [step_row(1), step_row(2)])
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for size in range(first, len(whole) - 1):
        path.write_bytes(whole[:size])
        terminate_last_line(path)
        metrics.append_rows(path, [step_row(3)])
        rows, unreadable = metrics.read_rows(path)
        assert [row[metrics.STEP] for row in rows] == [1, 3]
        assert unreadable == (size > first)


def test_seal_does_not_change_complete_files(path) -> None:
    terminate_last_line(path)
    assert not path.exists()
    metrics.append_rows(path, [step_row(1)])
    before = path.read_bytes()
    terminate_last_line(path)
    assert path.read_bytes() == before


def test_highest_attempt_of_each_step_is_used() -> None:
    rows = [step_row(s, 0) for s in (1, 2, 3)]
    rows += [step_row(s, 1, again=True) for s in (3, 4)]
    rows.append(step_row(2, 0, late=True))  # the same attempt: what was written last
    rows.append(step_row(4, 0))  # an older one: of no account
    latest = metrics.latest(rows, metrics.LOSS)
    assert [row[metrics.STEP] for row in latest] == [1, 2, 3, 4]
    assert [row[metrics.ATTEMPT] for row in latest] == [0, 0, 1, 1]
    assert "late" in latest[1]


def test_evaluations_and_steps_are_separated() -> None:
    rows = [step_row(1), {metrics.STEP: 1, metrics.EVAL_LOSS: 3.0}]
    assert metrics.latest(rows, metrics.EVAL_LOSS) == [rows[1]]
    assert metrics.latest(rows, metrics.LOSS) == [rows[0]]
    assert metrics.latest(rows, "absent") == []


def test_steps_without_a_row_are_counted(path) -> None:
    assert metrics.num_missing(path, 0) == 0
    assert metrics.num_missing(path, 3) == 3
    metrics.append_rows(path, [step_row(2), step_row(2), step_row(5), {metrics.STEP: 1}])
    assert metrics.num_missing(path, 3) == 2, "of the first three there is the second"
    assert metrics.num_missing(path, 5) == 3
