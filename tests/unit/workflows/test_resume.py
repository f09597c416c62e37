"""`train.resume=RUN`: a named run goes on with other ranks, under its id and in its folder."""

import json
from dataclasses import replace

import pytest

from eke.common.errors import EkeError
from eke.common.paths import RunPaths
from eke.common.screen import take_flags
from eke.launch.processes.run_dir import find_place
from eke.plan.planner import cut_of, outline_record, write_plan
from eke.plan.record import MeasuredMemory, Outcome, metrics, start_attempt, write_record
from eke.training.loop.results import _steps_by_division

RUN = ("data=synthetic", "tracker=none", "hardware=cpu", "train.steps=30", "model=tiny_gpt2")
FOUR = ("distributed=fsdp", "distributed.num_processes=4", "batch.per_device=2")
"""8 samples per step."""


@pytest.fixture
def begun(make_plan, tmp_path):
    """A function: the folder of a run that was planned so, and has begun."""

    def begin(*overrides: str) -> RunPaths:
        plan = make_plan(*RUN, *overrides, planning=True)
        paths = RunPaths(tmp_path / "runs" / plan.run_id)
        paths.folder.mkdir(parents=True)
        write_plan(paths, plan)
        start_attempt(paths, {}, cut_of(plan))
        return paths

    return begin


def planned(train_main, paths, *overrides):
    """What the command says of the run that is to go on."""
    take_flags(["-v"])
    try:
        return train_main(f"train.resume={paths.folder}", "plan_only=true", *overrides)
    finally:
        take_flags([])


@pytest.mark.parametrize(
    "cut",
    [
        ("distributed.num_processes=2", "batch.accumulation=2"),
        ("distributed.num_processes=2", "batch.per_device=4"),
        ("distributed=none", "batch.accumulation=4"),
        ("distributed=ddp", "distributed.num_processes=8", "batch.per_device=1"),
        (),
    ],
    ids=" ".join,
)
def test_other_rank_count_keeps_the_run_id(begun, train_main, cut) -> None:
    paths = begun(*FOUR)
    done = planned(train_main, paths, *cut)
    assert (done.code, f"plan {paths.folder.name}\n" in done.out) == (0, True), done.err


def test_second_rank_change_keeps_the_run_id(begun, train_main, make_plan) -> None:
    paths = begun(*FOUR)
    two = make_plan(*RUN, *FOUR[:1], "distributed.num_processes=2", "batch.per_device=4")
    assert two.run_id != paths.folder.name, "of its own it is another run"
    write_plan(paths, replace(two, run_id=paths.folder.name))
    start_attempt(paths, {}, cut_of(two))
    done = planned(train_main, paths, "distributed=none", "batch.accumulation=2")
    assert (done.code, f"plan {paths.folder.name}\n" in done.out) == (0, True)


@pytest.mark.parametrize(
    ("other", "fix"),
    [
        ("seed=4", "seed=0"),
        ("optimizer.lr=0.5", "optimizer.lr=0.001"),
        ("train.steps=31", "train.steps=30"),
        ("distributed.num_processes=2", "batch.per_device=2 batch.accumulation=2"),
        (
            "distributed.num_processes=3",
            "distributed.num_processes=2 batch.per_device=2 batch.accumulation=2",
        ),
        ("batch.per_device=1", "batch.per_device=2"),
    ],
)
def test_other_differences_are_rejected_by_key(begun, train_main, other, fix) -> None:
    paths = begun(*FOUR)
    done = planned(train_main, paths, other)
    assert done.code == 2
    assert f"-> {fix}" in done.err
    assert planned(train_main, paths, other, *fix.split()).code == 0


def test_run_with_other_data_is_not_resumed(begun, train_main) -> None:
    paths = begun(*FOUR)
    plan = json.loads(paths.plan.read_text())
    paths.plan.write_text(json.dumps({**plan, "run_id": "0" * 16}))
    done = planned(train_main, paths)
    assert (done.code, "-> train.resume=null" in done.err) == (2, True)


@pytest.mark.parametrize("option", [(), ("-m", "seed=1,2")], ids=["no run", "a sweep"])
def test_unknown_resume_name_is_rejected(begun, train_main, option) -> None:
    paths = begun(*FOUR)
    named = paths.folder if option else "nothing"
    done = train_main(*option, f"train.resume={named}", *RUN, *FOUR)
    assert (done.code, "train.resume" in done.out + done.err) == (2, True)


def test_record_of_a_named_run_is_not_overwritten(make_plan, begun, tmp_path) -> None:
    paths = begun(*FOUR)
    named = replace(make_plan(*RUN, *FOUR, planning=True).config.train, resume=str(paths.folder))
    plan = make_plan(*RUN, *FOUR, planning=True)
    plan = replace(plan, config=replace(plan.config, train=named))
    assert (find_place(plan).paths.folder, find_place(plan).record) == (paths.folder, None)
    write_record(paths, outline_record(plan, [], 0, Outcome.ok, None))
    place = find_place(plan, changes_since=lambda *_: ["torch: 1 -> 2"])
    assert place.record is not None
    paths.record.write_text("{}")
    with pytest.raises(EkeError):
        find_place(plan)


@pytest.mark.parametrize("value", ["'a", "[a]", "a(1)"])
def test_unparsable_name_is_rejected_by_key(train_main, value) -> None:
    done = train_main(f"train.resume={value}")
    assert (done.code, "train.resume = " in done.err) == (2, True)


def test_finished_named_run_is_not_repeated(begun, train_main) -> None:
    done = planned(train_main, begun(*FOUR), "rerun=true", "seed=4")
    assert (done.code, "-> rerun=false" in done.err, "-> seed=0" in done.err) == (2, True, True)


def test_dropout_is_reported(begun, train_main) -> None:
    paths = begun(*FOUR, "model.dropout=0.1")
    same, other = (
        planned(train_main, paths),
        planned(train_main, paths, "distributed.num_processes=2", "batch.accumulation=2"),
    )
    assert ["dropout" in each.out.split("warning:", 1)[-1] for each in (same, other)] == [
        False,
        True,
    ]


def test_run_with_two_batch_layouts_has_no_speed() -> None:
    def row(step: int, **more: int) -> metrics.Row:
        phases = {key: 0.5 for key in metrics.PHASE_KEYS.values()}
        counts = {metrics.SAMPLES: 8, metrics.TOKENS: 80}
        return {
            metrics.STEP: step,
            metrics.LOSS: 1.0,
            metrics.STEP_TIME: 2.5,
            **phases,
            **counts,
            **more,
        }

    one = [row(step) for step in range(1, 9)]
    two = [row(step, **({metrics.CUT: 1} if step > 4 else {})) for step in range(1, 9)]
    assert metrics.timing(one).steady_step_s.n == 8
    assert metrics.timing(two).steady_step_s is None
    assert metrics.timing(two).train_s == 20
    rates = [metrics.throughput(rows, 1.0, "", 1, None).samples_per_s for rows in (one, two)]
    assert rates == [3.2, None]
    cuts = [{"cut": {"batch": n}} for n in (0, 0, 1)]
    found = _steps_by_division(two, cuts, MeasuredMemory(peak_allocated_bytes=7))
    assert [(each["steps"], each["steady_step_s"]["median"]) for each in found] == [(4, 2.5)] * 2
    assert [each.get("peak_allocated_bytes") for each in found] == [None, 7]
