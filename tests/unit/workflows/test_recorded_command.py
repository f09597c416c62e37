"""The recorded command, typed again, is the same run: with a folder of one's own, of a sweep's."""

from pathlib import Path

import pytest

from eke.config.compose import compose, split_arguments
from eke.config.sweep import expand
from eke.plan.planner import outline_record
from eke.plan.record import Outcome
from eke.workflows.planning import plan_for

MINE = """# @package _global_
# My sweep
defaults:
  - override /optimizer: adafactor
  - _self_
sweep:
  repeats: 2
  rows:
    fp32: {precision: fp32}
    bf16: {precision: bf16}
"""


@pytest.fixture
def own(tmp_path) -> Path:
    for name, text in (
        ("sweep/mine", MINE),
        ("experiment/ours", "# @package _global_\n# Ours\nseed: 7\n"),
    ):
        file = tmp_path / "my conf" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "my conf"


def typed_again(command):
    arguments = split_arguments(command[2:])
    composed = compose(arguments.overrides, arguments.config_dir, in_sweep=arguments.cell)
    return plan_for(composed, planning=True)


def command_of(plan):
    record = outline_record(plan, [], 0, Outcome.ok, None)
    assert record.command[:2] == ["python", "train.py"]
    return record.command


def test_recorded_command_of_a_single_run(own, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    relative = own.relative_to(tmp_path)
    plan = plan_for(compose(["experiment=ours", "hardware=cpu"], relative), planning=True)
    monkeypatch.chdir("/")
    assert typed_again(command_of(plan)).run_id == plan.run_id


@pytest.mark.slow
def test_recorded_command_of_each_run_of_a_sweep(own):
    cells = expand(["sweep=mine", "hardware=cpu", "seed=0,1"], own).cells
    plans = [plan_for(cell.composed, planning=True) for cell in cells]
    assert len({plan.run_id for plan in plans}) == 8
    assert [typed_again(command_of(plan)).run_id for plan in plans] == [p.run_id for p in plans]
