"""A run starts only where it has room beside what others, and runs of its sweep, hold then."""

import dataclasses
from collections import deque
from collections.abc import Callable
from functools import partial

import pytest
from unit.launch.scripted import record_for

from eke.common.text import GIB
from eke.estimate.memory import known_forecast, least_bytes, least_host_bytes
from eke.hardware import cpu_slots
from eke.launch.devices import DeviceLease, Devices
from eke.launch.local import FreeMemory
from eke.launch.processes.sweep import Job
from eke.plan.record import Outcome

WHOLE = 64 * GIB


@pytest.fixture
def make_large(make_jobs, plan) -> Callable[..., list[Job]]:
    """Jobs on a device of 64 GiB, of which each needs some by the lowest forecast."""

    def make(*needs: int, kind: str = "cpu") -> list[Job]:
        jobs = make_jobs(*needs)
        for job in jobs:
            device = dataclasses.replace(job.plan.device, kind=kind, memory_bytes=WHOLE)
            job.plan = dataclasses.replace(job.plan, device=device)
        return jobs

    return make


@pytest.fixture
def need(make_large) -> int:
    """Bytes that each of them needs at least."""
    found = make_large(1)[0].plan
    return least_bytes(found, known_forecast(found))


def room_with(free: dict[str, int] | int, held: int = 0) -> Callable[..., FreeMemory]:
    """So much is free on each device, and each run beside holds so much of it."""
    left = (lambda slot: free[slot.device]) if isinstance(free, dict) else (lambda slot: free)
    return partial(FreeMemory, free=left, resident=lambda pid: held)


def test_run_without_room_is_reported_and_others_continue(
    make_large, make_pool, machine, need
) -> None:
    jobs = make_large(1, 1, 1)
    small = dataclasses.replace(jobs[1].plan.config, ignore_forecast=True)
    jobs[1].plan = dataclasses.replace(jobs[1].plan, config=small)
    pool = make_pool(jobs, Devices(cpu_slots(1)))
    pool.devices, pool.room = {"cpu": pool.devices["cuda"]}, room_with(need - 1)
    pool.wait()
    assert [job.outcome for job in jobs] == [Outcome.crashed, Outcome.ok, Outcome.crashed]
    assert [run for run, _ in machine.started] == ["b"]
    assert "needs at least" in jobs[0].reason
    assert "free now" in jobs[0].reason
    assert "ignore_forecast=true" in jobs[0].reason
    assert [job.rule for job in jobs] == ["does_not_fit", "", "does_not_fit"]


def test_run_waits_for_memory_of_its_sweep(make_large, make_pool, machine, need) -> None:
    jobs = make_large(1, 1, 1)
    machine.ends = {job.plan.run_id: deque([("ok", 20, 3)]) for job in jobs}
    pool = make_pool(jobs, Devices(cpu_slots(2), shared=True))
    pool.devices = {"cpu": pool.devices["cuda"]}
    looked, most = pool.step, []
    # Right after its start a run holds nothing yet, and will need all the same.
    pool.room = room_with(2 * need - 1)

    def step() -> None:
        looked()
        most.append(len(pool.books.running()))

    pool.step = step
    pool.wait()
    assert {job.outcome for job in jobs} == {Outcome.ok}
    assert max(most) == 1


def test_memory_of_a_running_run_is_not_counted_twice(make_large, need) -> None:
    waits, runs = make_large(1, 1)
    runs.live, runs.grant = record_for("b", "ok"), DeviceLease(cpu_slots(1), [], shared=False)
    slot = cpu_slots(1)[0]
    assert room_with(need, held=need)(waits.plan, [runs]).left(slot) == need
    assert room_with(need, held=2 * need)(waits.plan, [runs]).left(slot) == need
    assert room_with(2 * need, held=0)(waits.plan, [runs]).left(slot) == need
    assert room_with(2 * need)(waits.plan, []).left(slot) == 2 * need


def test_host_memory_of_gpu_runs_is_attributed_to_their_sweep(
    make_large, make_pool, machine, gpus, need
) -> None:
    """A run on the CPU waits for them; it is not told that others hold what they hold."""
    (there,) = make_large(1, kind="cuda")
    (here,) = make_large(1)
    here.number, here.plan = 1, dataclasses.replace(here.plan, run_id="b")
    machine.ends = {"a": deque([("ok", 20, 3)])}
    pool = make_pool([there, here], gpus(1))
    pool.devices = {**pool.devices, "cpu": Devices(cpu_slots(1))}
    whole = 2 * need - 1
    device = dataclasses.replace(here.plan.device, memory_bytes=whole)
    here.plan = dataclasses.replace(here.plan, device=device)

    def room(plan, running) -> FreeMemory:
        free = whole - need * len(running)
        return FreeMemory(
            plan, running, lambda slot: WHOLE if slot.is_gpu else free, lambda _: need
        )

    pool.room = room
    pool.wait()
    assert [job.outcome for job in (there, here)] == [Outcome.ok, Outcome.ok], here.reason
    assert [run for run, _ in machine.started] == ["a", "b"]


def test_gpu_run_requires_host_memory(make_large, gpus) -> None:
    """Right after its start it holds nothing yet; on the GPU it has nothing of the CPU's runs."""
    (there,), (here,) = make_large(1, kind="cuda"), make_large(1)
    (gpu,), (cpu,) = gpus(1).slots, cpu_slots(1)
    there.grant, here.grant = (
        DeviceLease([gpu], [], shared=False),
        DeviceLease([cpu], [], shared=False),
    )
    python = least_host_bytes(there.plan, known_forecast(there.plan))
    assert python == GIB // 2
    room = room_with(WHOLE)
    assert room(here.plan, [there]).left(cpu) == WHOLE - python
    assert room(there.plan, [here]).left(gpu) == WHOLE


def test_another_gpu_with_free_memory_is_used(make_large, make_pool, machine, gpus, need) -> None:
    jobs = make_large(1, 1, kind="cuda")
    pool = make_pool(jobs, gpus(2, runs_per_device=2))
    pool.room = room_with({"GPU-0": 0, "GPU-1": WHOLE})
    pool.wait()
    assert {where for _, where in machine.started} == {"GPU 1"}
    assert {job.outcome for job in jobs} == {Outcome.ok}


def test_missing_gpu_memory_is_reported(make_large, make_pool, machine, gpus) -> None:
    (job,) = make_large(1, kind="cuda")
    pool = make_pool([job], gpus(2))
    pool.room = room_with(1)
    pool.wait()
    assert job.outcome is Outcome.crashed
    assert "64.00 GiB, 1 B " in job.reason


def test_unknown_free_memory_does_not_block_a_run(make_large, make_pool, machine, gpus) -> None:
    (job,) = make_large(1, kind="cuda")
    pool = make_pool([job], gpus(1))
    pool.room = partial(FreeMemory, free=lambda slot: None)
    pool.wait()
    assert job.outcome is Outcome.ok
