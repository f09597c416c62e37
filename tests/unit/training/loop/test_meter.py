"""What the meter makes of notes and stamps, on a clock that tells what it is told."""

from dataclasses import dataclass, field

import pytest
import torch

from eke.plan.record import metrics
from eke.training.distributed.ranks import StepTotals
from eke.training.loop.meter import Clock, Meter


@dataclass
class FakeClock:
    """Every stamp is a number of its own; seconds between stamps come from a list of moments."""

    moments: list[float]
    taken: int = 0
    asked: list[tuple[int, int]] = field(default_factory=list)

    def stamp(self) -> int:
        self.taken += 1
        return self.taken - 1

    def seconds(self, start: int, end: int) -> float:
        self.asked.append((start, end))
        return self.moments[end] - self.moments[start]


ONE_STEP = [0.0, 1.0, 3.0, 7.0, 15.0]
"""data 1 s, forward 2 s, backward 4 s, optimizer 8 s."""


def do_step(meter: Meter, step: int = 0, phases=metrics.PHASES[1:], loss=2.5, norm=0.5) -> None:
    """Go through the phases of a step and end it."""
    for phase in phases:
        meter.enter(phase)
    norm = None if norm is None else torch.tensor(norm)
    meter.end_step(step, torch.tensor(4 * loss), norm, 1e-3, StepTotals(4, 8, 256))


def seconds_of(row: metrics.Row) -> dict[str, float]:
    """Seconds of each phase of the step itself."""
    return {phase: row[metrics.PHASE_KEYS[phase]] for phase in metrics.PHASES[1:]}


def test_missing_norm_affects_only_its_row() -> None:
    meter = Meter(FakeClock(ONE_STEP * 3), attempt=0, timed_from=0)
    for step, norm in enumerate((0.5, None, 0.75)):
        do_step(meter, step, loss=float(step), norm=norm)
    rows = meter.flush()
    assert [row.get(metrics.GRAD_NORM) for row in rows] == [0.5, None, 0.75]
    assert metrics.GRAD_NORM not in rows[1]
    assert [row[metrics.LOSS] for row in rows] == [0.0, 1.0, 2.0]


def test_rows_are_marked_after_another_run_appears() -> None:
    meter = Meter(FakeClock(ONE_STEP * 3), attempt=0, timed_from=0)
    marked = []
    for step, shared in enumerate((None, False, True)):
        meter.is_shared = lambda shared=shared: shared
        do_step(meter, step)
        marked += [metrics.SHARED in row for row in meter.flush()]
    assert marked == [False, False, True]


def test_row_describes_its_step() -> None:
    meter = Meter(FakeClock(ONE_STEP), attempt=2, timed_from=0)
    do_step(meter, step=6)
    (row,) = meter.flush()
    assert row == {
        "train/global_step": 7,  # steps done
        "attempt": 2,
        "train/loss": 2.5,
        "train/grad_norm": 0.5,
        "train/learning_rate": 1e-3,
        "train/step_time_s": 15.0,
        "train/between_time_s": 0.0,
        "train/data_time_s": 1.0,
        "train/forward_time_s": 2.0,
        "train/backward_time_s": 4.0,
        "train/optimizer_time_s": 8.0,
        "train/samples": 8,
        "train/tokens": 256,
    }


@pytest.mark.parametrize("sources", [(), ("a", "b")], ids=["one", "mix"])
def test_router_loss_is_recorded_with_the_cross_entropy(sources) -> None:
    """As of `with_router`: what is trained, the sources, and its router loss."""
    meter = Meter(FakeClock(ONE_STEP), attempt=0, timed_from=0, sources=sources)
    parts = [12.0, *(3.0, 5.0)[: len(sources)], 4.0]
    each = [(4, 4), (1, 3)] if sources else []
    meter.end_step(0, torch.tensor(parts), None, 1e-3, StepTotals(4, 8, 256, None, *each))
    (row,) = meter.flush()
    assert (row[metrics.LOSS], row[metrics.ROUTER_LOSS]) == (2.0, 1.0)
    assert [row[f"train/loss/{name}"] for name in sources] == [3.0, 5.0 / 3][: len(sources)]


def test_phases_of_several_micro_batches_add_up() -> None:
    moments = [0.0, 1.0, 3.0, 7.0, 17.0, 37.0, 40.0]
    meter = Meter(FakeClock(moments), 0, 0)
    do_step(meter, phases=("data", "forward", "backward", "forward", "backward", "optimizer"))
    (row,) = meter.flush()
    assert seconds_of(row) == {"data": 1, "forward": 2 + 10, "backward": 4 + 20, "optimizer": 3}
    assert row[metrics.STEP_TIME] == 40
    meter = Meter(FakeClock([0.0, 5.0]), 0, 0)
    do_step(meter, phases=("forward",))  # a phase that was not entered took no time
    (row,) = meter.flush()
    assert seconds_of(row) == {"data": 0, "forward": 5, "backward": 0, "optimizer": 0}


TWO_STEPS = [0.0, 1.0, 2.0, 3.0, 4.0, 100.0, 102.0, 104.0, 106.0, 108.0]
"""96 s lie between them."""


def test_step_begins_at_the_end_of_the_previous_step() -> None:
    meter = Meter(FakeClock(TWO_STEPS), 0, 0)
    do_step(meter, 0)
    meter.flush()  # what is written in between is what takes that time
    do_step(meter, 1)
    (row,) = meter.flush()
    assert row[metrics.STEP_TIME] == TWO_STEPS[-1] - TWO_STEPS[4]
    assert row[metrics.PHASE_KEYS["between"]] == 96
    assert seconds_of(row) == dict.fromkeys(metrics.PHASES[1:], 2)


def test_evaluation_between_steps_is_excluded() -> None:
    meter = Meter(FakeClock(TWO_STEPS), 0, 0)
    do_step(meter, 0)
    meter.leave("eval")
    do_step(meter, 1)
    assert meter.phase == "optimizer"
    assert [row[metrics.STEP_TIME] for row in meter.flush()] == [4, 8]


@pytest.mark.parametrize(
    ("timed_from", "expected"),
    [(0, [False] * 4), (2, [True, True, False, False]), (9, [True] * 4)],
    ids=["none", "the-first-two", "all"],
)
def test_steps_before_timed_from_are_warm_up(timed_from, expected) -> None:
    meter = Meter(FakeClock(list(range(20))), 0, timed_from)
    for step in range(4):
        do_step(meter, step)
    rows = meter.flush()
    assert [row.get(metrics.WARMUP) == 1 for row in rows] == expected
    assert [metrics.WARMUP in row for row in rows] == expected  # absent, not 0


def test_step_is_written_once() -> None:
    meter = Meter(FakeClock(list(range(20))), 0, 0)
    assert meter.flush() == []
    do_step(meter, 0)
    assert len(meter.flush()) == 1
    assert meter.flush() == []
    do_step(meter, 1)
    assert [row[metrics.STEP] for row in meter.flush()] == [2]


def test_interrupted_step_is_not_written() -> None:
    meter = Meter(FakeClock(list(range(20))), 0, 0)
    do_step(meter, 0)
    meter.enter("data")
    meter.enter("forward")  # out of memory here
    assert meter.phase == "forward"
    assert [row[metrics.STEP] for row in meter.flush()] == [1]


def test_clock_is_read_only_when_rows_are_written() -> None:
    clock = FakeClock(ONE_STEP)
    meter = Meter(clock, 0, 0)
    do_step(meter)
    assert clock.asked == []  # on a GPU, asking waits
    meter.flush()
    assert clock.asked == [(0, 1), (1, 2), (2, 3), (3, 4)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_numbers_of_any_format_are_accepted(dtype) -> None:
    meter = Meter(FakeClock(ONE_STEP), 0, 0)
    for phase in metrics.PHASES[1:]:
        meter.enter(phase)
    loss = torch.tensor([1.5], dtype=dtype, requires_grad=True)
    meter.end_step(0, loss, torch.tensor(0.25), 1e-3, StepTotals(1, 1, 1))
    (row,) = meter.flush()
    assert (row[metrics.LOSS], row["train/grad_norm"]) == (1.5, 0.25)


def test_host_clock_is_monotonic_in_seconds(monkeypatch) -> None:
    moments = iter([10.0, 10.25])
    monkeypatch.setattr("time.perf_counter", lambda: next(moments))
    clock = Clock()
    assert clock.seconds(clock.stamp(), clock.stamp()) == 0.25


@pytest.mark.parametrize(("device", "has_stream"), [("cpu", False), ("cuda:0", True)])
def test_each_device_has_its_clock(device, has_stream) -> None:
    assert Clock(torch.device(device)).has_stream is has_stream
