"""The fault campaign in its short form; tests/faults.py by hand has as many faults as one likes."""

import random

import pytest
from faults import BrokenPromise, Round, campaign

FAULTS = 3


@pytest.mark.slow
def test_local_fault_campaign(tmp_path) -> None:
    counts = campaign("local", FAULTS, seed=11, root=tmp_path)
    assert counts.total() == FAULTS


def test_fault_campaign_detects_overwritten_record(tmp_path) -> None:
    one = Round(tmp_path, "local", random.Random(0))
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    (run / "record.json").write_text('{"outcome": "ok"}')
    one.look()
    (run / "attempts.jsonl").write_text('{"attempt": 0}\n')
    with pytest.raises(BrokenPromise, match="started again"):
        one.look()
    (run / "attempts.jsonl").unlink()
    (run / "record.json").write_text('{"outcome": "ok", "x": 1}')
    with pytest.raises(BrokenPromise, match="written over"):
        one.look()
    (run / "record.json").unlink()
    with pytest.raises(BrokenPromise, match="gone"):
        one.look()
