"""record.json and attempts.jsonl: what was written comes back, and what is broken is named."""

import json
import math

import pytest
from unit.plan.record.samples import bare_record, failed, full_record

from eke.common.errors import EkeError
from eke.common.paths import RunPaths
from eke.plan.record import (
    RECORD_VERSION,
    Spread,
    Timing,
    UnreadableRecord,
    read_attempts,
    read_record,
    start_attempt,
    write_record,
)


@pytest.fixture
def paths(tmp_path):
    return RunPaths(tmp_path)


@pytest.mark.parametrize(
    "record",
    [full_record(), bare_record(), failed("oom"), full_record(shared_device=None)],
    ids=["full", "bare", "failed", "not looked at"],
)
def test_record_round_trips(record, paths) -> None:
    write_record(paths, record)
    assert read_record(paths) == record


def test_missing_record_is_none(paths) -> None:
    assert read_record(paths) is None


def test_non_finite_measurements_are_strict_json(paths) -> None:
    write_record(paths, bare_record(timing=Timing(steady_step_s=Spread(math.inf, 0.0, 1.0, 3))))
    json.loads(paths.record.read_text(), parse_constant=pytest.fail)
    assert read_record(paths).timing.steady_step_s.median == math.inf


def damaged(**changes):
    def change(content):
        return json.dumps(content | changes)

    return change


def without(key):
    return lambda content: json.dumps({k: v for k, v in content.items() if k != key})


DAMAGE = {
    "torn": lambda content: json.dumps(content)[:100],
    "empty": lambda content: "",
    "not an object": lambda content: "[1, 2]",
    "null": lambda content: "null",
    "older version": damaged(schema_version=RECORD_VERSION - 1),
    "newer version": damaged(schema_version=RECORD_VERSION + 1),
    "no version": without("schema_version"),
    "unknown key": damaged(speed=3),
    "missing key": without("run_id"),
    "wrong type": damaged(steps_done="many"),
    "unknown nested key": damaged(loss={"train_last": 1.0}),
    "unknown outcome": damaged(outcome="exploded"),
    "infinite number": damaged(config={"seed": math.inf}),
    "wide integer": damaged(plan={"batch": {"devices": 10**300}}),
    "deep": damaged(config=json.loads('{"a":' * 200 + "1" + "}" * 200)),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_broken_record_is_reported_with_its_file(damage, paths) -> None:
    write_record(paths, full_record())
    content = damage(json.loads(paths.record.read_text()))
    paths.record.write_text(content)
    with pytest.raises(UnreadableRecord) as caught:
        read_record(paths)
    assert str(paths.record) in str(caught.value)
    assert isinstance(caught.value, EkeError)
    assert paths.record.read_text() == content, "a broken record is never touched"


def test_binary_record_is_reported(paths) -> None:
    paths.record.write_bytes(b"\xff\x00\xfe")
    with pytest.raises(UnreadableRecord, match=r"record\.json"):
        read_record(paths)


def test_record_version_is_reported(paths) -> None:
    paths.record.write_text('{"schema_version": 99}')
    with pytest.raises(UnreadableRecord, match=f"version 99, this eke reads {RECORD_VERSION}"):
        read_record(paths)


def test_attempts_are_numbered_from_zero(paths) -> None:
    assert read_attempts(paths) == []
    machine = {"device": "a"}
    assert [start_attempt(paths, machine, {}) for _ in range(3)] == [0, 1, 2]
    assert [entry["attempt"] for entry in read_attempts(paths)] == [0, 1, 2]
    assert all(entry["machine"] == machine for entry in read_attempts(paths))


def test_torn_attempt_does_not_hide_the_next(paths) -> None:
    start_attempt(paths, {}, {})
    with open(paths.attempts, "ab") as file:
        file.write(b'{"attempt": 1, "pi\xc3')
    assert start_attempt(paths, {}, {}) == 1
    assert [entry["attempt"] for entry in read_attempts(paths)] == [0, 1]


@pytest.mark.parametrize("line", ["5", "[1]", "null", '"text"'])
def test_invalid_line_is_not_an_attempt(line, paths) -> None:
    start_attempt(paths, {}, {})
    with open(paths.attempts, "a") as file:
        file.write(f"{line}\n")
    assert start_attempt(paths, {}, {}) == 1
    assert [entry["attempt"] for entry in read_attempts(paths)] == [0, 1]
