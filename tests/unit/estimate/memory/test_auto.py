"""batch=auto: which micro-batch is taken, by what is known; forecasts and probes are scripted."""

from dataclasses import replace

import pytest
from unit.plan.cases import CPU, GPU, SYNTHETIC, config_of, plan_config, plan_of

from eke.common.text import GIB
from eke.estimate.memory import BatchSearch, auto_batch, forecast, room_for_a_batch
from eke.estimate.memory.auto_batch import HOST_BYTES, MAX_PROBES
from eke.estimate.memory.components import Range
from eke.estimate.memory.predict_memory import PYTHON_BYTES
from eke.plan.planner import possible_batches, replan

TYPED = (*SYNTHETIC, "batch=auto", "batch.target=64")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def plans_of(*overrides: str, device=GPU):
    """A plan for each micro-batch, the smallest first."""
    config = config_of(*TYPED, *overrides)
    first, *others = possible_batches(config)
    plan = plan_config(first, device)
    return [plan, *(replan(plan, each) for each in others)]


@pytest.fixture
def told(monkeypatch):
    """Memory in the size of the micro-batch: formulas are off by a half, traces by a tenth."""

    class Told:
        def __init__(self) -> None:
            self.traced: list[int] = []

        def script(self, plan, share: float):
            size = plan.batch.per_device
            peak = Range(int(size * (1 - share) * 100), size * 100, int(size * (1 + share) * 100))
            return replace(forecast(plan_of(*SYNTHETIC)), peak=peak)

        def known(self, plan):
            return self.script(plan, 0.5)

        def trace(self, plan):
            self.traced.append(plan.batch.per_device)
            return self.script(plan, 0.1)

    told = Told()
    monkeypatch.setattr(auto_batch, "known_forecast", told.known)
    monkeypatch.setattr(auto_batch, "traced_forecast", told.trace)
    return told


class Prober:
    """Fits up to a size, or crashes; remembers what it was asked."""

    def __init__(self, most: int, crashes: bool = False) -> None:
        self.most, self.crashes, self.asked = most, crashes, []

    def __call__(self, plan) -> bool | None:
        self.asked.append(plan.batch.per_device)
        return None if self.crashes else self.asked[-1] <= self.most


def size_of(search: BatchSearch) -> tuple[int, str]:
    chosen = search.run()
    return search.plans[chosen.number].batch.per_device, chosen.how


# --- by prediction ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capacity", "trace", "expected"),
    [
        pytest.param(9600, False, 64, id="the whole target, by the high end of formulas"),
        pytest.param(9599, False, 32, id="one byte less"),
        pytest.param(9599, True, 64, id="a trace knows better"),
        pytest.param(2000, False, 8, id="formulas"),
        pytest.param(2000, True, 16, id="traces"),
        pytest.param(150, True, 1, id="the smallest"),
    ],
)
def test_largest_batch_with_a_fitting_high_end_is_chosen(told, capacity, trace, expected) -> None:
    assert size_of(BatchSearch(plans_of(), capacity, trace)) == (expected, "predicted")


def test_formulas_that_decide_avoid_traces(told) -> None:
    BatchSearch(plans_of(), 10**6, trace=True).run()
    assert told.traced == []


def test_only_undecided_batches_are_traced(told) -> None:
    BatchSearch(plans_of(), 2000, trace=True).run()
    assert told.traced
    assert set(told.traced) <= {16, 32}, "8 has room by formulas, 64 has none"


def test_smallest_batch_is_taken_if_no_batch_fits(told) -> None:
    chosen = BatchSearch(plans_of(), 95, trace=True).run()
    assert (chosen.number, chosen.fits, chosen.how) == (0, False, "predicted")


@pytest.mark.parametrize(("capacity", "room"), [(3300, None), (2500, False)])
def test_next_larger_batch_is_open_or_does_not_fit(told, capacity, room) -> None:
    search = BatchSearch(plans_of(), capacity, trace=True)
    above = search.run().number + 1
    assert search.forecast(above).peak.expected == 3200
    assert search.fits(above) is room


# --- by trying out ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "capacity", "prober", "expected", "asked"),
    [
        pytest.param(GPU, 3300, Prober(64), (32, "probed"), [32], id="fits"),
        pytest.param(GPU, 3300, Prober(16), (16, "predicted"), [32], id="fails"),
        pytest.param(GPU, 3300, Prober(64, crashes=True), (16, "predicted"), [32], id="crashes"),
        pytest.param(GPU, 2500, Prober(64), (16, "predicted"), [], id="no room by a trace"),
        pytest.param(CPU, 3100, Prober(64), (16, "predicted"), [], id="a CPU is not filled"),
        pytest.param(CPU, 3250, Prober(64), (32, "probed"), [32], id="a CPU"),
    ],
)
def test_undecided_trace_is_followed_by_a_probe(
    told, device, capacity, prober, expected, asked
) -> None:
    assert size_of(BatchSearch(plans_of(device=device), capacity, True, prober)) == expected
    assert prober.asked == asked


@pytest.mark.parametrize("most", [1, 2, 4, 8, 16, 32, 64])
def test_probe_search_ends_and_avoids_failed_batches(told, most) -> None:
    prober = Prober(most)
    size, _ = size_of(BatchSearch(plans_of(), 199, False, prober))
    assert len(prober.asked) <= MAX_PROBES
    assert size <= max(1, most)
    assert all(asked < 4 for asked in prober.asked), "4 has no room by any bound"


def test_smallest_batch_can_fail(told) -> None:
    search = BatchSearch(plans_of(), 105, True, Prober(0))
    chosen = search.run()
    assert (chosen.number, chosen.fits) == (0, False)
    assert search.known.has_failed(search.plans[0])


def test_repeated_search_reuses_earlier_probes(told) -> None:
    for most, expected in ((64, (32, "probed")), (16, (16, "predicted"))):
        capacity = 3300 + most  # another device
        assert size_of(BatchSearch(plans_of(), capacity, True, Prober(most))) == expected
        again = Prober(most)
        assert size_of(BatchSearch(plans_of(), capacity, True, again)) == expected
        assert again.asked == []


def test_probes_are_shared_across_seeds_but_not_models(told) -> None:
    BatchSearch(plans_of(), 3300, True, Prober(64)).run()
    for typed, asked in (
        (("seed=1", "optimizer.lr=0.1"), []),
        (("batch.target=32",), []),
        (("data.seq_len=16",), [32]),
    ):
        again = Prober(64)
        BatchSearch(plans_of(*typed), 3300, True, again).run()
        assert again.asked == asked, typed


# --- what is kept -------------------------------------------------------------------------------


def test_started_run_keeps_its_batch(told) -> None:
    search = BatchSearch(plans_of(), 2000, trace=False)
    assert size_of(search) == (8, "predicted")
    auto_batch.note_choice(search.key, 64, 8)
    assert size_of(BatchSearch(plans_of(), 2000, trace=True)) == (8, "as before")
    assert size_of(BatchSearch(plans_of(), 2001, trace=True)) == (16, "predicted"), "another device"


def test_failed_choice_is_replaced(told) -> None:
    search = BatchSearch(plans_of(), 2000, trace=False)
    auto_batch.note_choice(search.key, 64, 8)
    auto_batch.note_probe(search.key, 8, fits=False)
    assert size_of(BatchSearch(plans_of(), 2000, trace=True)) == (4, "predicted")


def test_newer_of_contradicting_probes_is_used() -> None:
    assert auto_batch.note_probe("k", 16, fits=True) == auto_batch.ProbeResults(fits=16)
    assert auto_batch.note_probe("k", 32, fits=False) == auto_batch.ProbeResults(fits=16, fails=32)
    assert auto_batch.note_probe("k", 8, fits=True) == auto_batch.ProbeResults(fits=16, fails=32)
    assert auto_batch.note_probe("k", 16, fits=False) == auto_batch.ProbeResults(fits=0, fails=16)
    assert auto_batch.note_probe("k", 64, fits=True) == auto_batch.ProbeResults(fits=64)


# --- capacity -----------------------------------------------------------------------------------


def test_cpu_room_reserves_memory_for_python() -> None:
    two = ("distributed=ddp", "distributed.num_processes=2")
    whole = CPU.memory_bytes
    assert whole == 8 * GIB
    taken = PYTHON_BYTES + HOST_BYTES
    assert room_for_a_batch(plan_of(*SYNTHETIC)) == whole - taken
    assert room_for_a_batch(plan_of(*SYNTHETIC, *two)) == whole // 2 - taken
    assert room_for_a_batch(plan_of(*SYNTHETIC), share=2) == whole // 2 - taken
    assert room_for_a_batch(plan_of(*SYNTHETIC, device=GPU)) == GPU.memory_bytes
    unknown = replace(CPU, memory_bytes=None)
    assert room_for_a_batch(plan_of(*SYNTHETIC, device=unknown)) is None


def test_choice_is_kept_and_probe_is_not_kept_across_free_memory(told) -> None:
    """The same command stays the same run; what ran out beside others may fit without them."""
    plans, whole = plans_of(device=CPU), 9600
    first = BatchSearch(plans, 3300, False, Prober(16), whole)
    assert (size_of(first)[0], first.known.fails) == (16, 32)
    auto_batch.note_choice(first.key, 64, 16)
    alone = BatchSearch(plans, whole, False, None, whole)
    assert (alone.known.fits, alone.known.fails) == (0, None)
    assert size_of(alone) == (16, "as before")
    assert size_of(BatchSearch(plans, 100, False, None, whole)) == (16, "as before")
