"""Peak memory of a CPU step, against steps whose tensors were counted by hand."""

from contextlib import nullcontext
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from eke.training.observe.memory_stages import AllocationProfile, live_bytes, memory_in_use

KB = 1024


def tensor(kilobytes: int) -> torch.Tensor:
    return torch.empty(kilobytes * KB, dtype=torch.uint8)


@pytest.fixture(autouse=True)
def quiet_profiler(monkeypatch):
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")


def test_peak_is_the_highest_sum() -> None:
    with AllocationProfile(alive_before=7) as profile:
        first = tensor(300)
        second = tensor(200)  # 500
        del first
        third = tensor(250)  # 450
        del second, third
        fourth = tensor(400)
        del fourth
    assert profile.peak == 7 + 500 * KB


def test_peak_may_include_tensors_freed_from_before() -> None:
    """torch's profiler knows sizes of earlier blocks only now and then: an upper bound otherwise.

    A training step frees none: gradients and activations live within it.
    """
    before = tensor(400)
    with AllocationProfile(alive_before=400 * KB) as profile:
        del before
        after = tensor(300)
    assert profile.peak in (400 * KB, 700 * KB)
    assert after.numel() == 300 * KB


def test_peak_is_unchanged_by_profiling_in_pieces() -> None:
    with AllocationProfile(alive_before=7) as profile:
        kept = tensor(300)
        passing = tensor(200)  # 500
        del passing
        profile.cut()
        passing = tensor(250)  # 550
        del passing
        profile.cut()
        passing = tensor(100)
    assert profile.peak == 7 + 550 * KB
    assert kept.numel() + passing.numel() == 400 * KB


def test_release_in_another_thread_is_counted() -> None:
    """As a thread of gloo does that is the last to hold what FSDP2 gathered."""
    with AllocationProfile(0) as profile:
        for _ in range(3):
            box = [tensor(300)]
            thread = Thread(target=box.clear)
            thread.start()
            thread.join()
            kept = tensor(10)
    assert 310 * KB <= profile.peak <= 320 * KB
    assert kept.numel() == 10 * KB


def test_allocation_in_another_thread_is_counted() -> None:
    box = []
    with AllocationProfile(0) as profile:
        first = tensor(100)
        thread = Thread(target=lambda: box.append(tensor(300)))
        thread.start()
        thread.join()
        last = tensor(50)
    assert profile.peak == 450 * KB
    assert sum(each.numel() for each in (*box, first, last)) == 450 * KB


def test_peak_is_correct_with_a_single_thread_profiler(monkeypatch) -> None:
    monkeypatch.setattr(
        "eke.training.observe.memory_stages.torch.__file__", "/nowhere/torch/__init__.py"
    )
    test_peak_is_the_highest_sum()
    test_peak_is_unchanged_by_profiling_in_pieces()


def test_step_without_allocations_is_not_measured() -> None:
    """Every training step allocates: it is the profiler that tells something else."""
    with AllocationProfile(123) as profile:
        pass
    assert (profile.peak, bool(profile.problem)) == (None, True)


@pytest.mark.parametrize("lacks", ["the tree", "the kind", "the size"])
def test_unknown_profiler_format_gives_no_peak(lacks, monkeypatch) -> None:
    """As that of a newer PyTorch may be: the run goes on, and its record has no peak."""
    event = SimpleNamespace(children=[], start_time_ns=0, extra_fields=SimpleNamespace())
    kinds = SimpleNamespace() if lacks == "the kind" else SimpleNamespace(Allocation=1)
    event.tag = type("Kind", (int,), vars(kinds))(1)
    results = SimpleNamespace(experimental_event_tree=lambda: [event])
    given = SimpleNamespace(kineto_results=SimpleNamespace() if lacks == "the tree" else results)
    ended = nullcontext()
    monkeypatch.setattr(
        "eke.training.observe.memory_stages.profile",
        lambda **_: SimpleNamespace(
            __enter__=ended.__enter__, __exit__=ended.__exit__, **vars(given)
        ),
    )
    with AllocationProfile(0) as profile:
        tensor(10)
        profile.cut()
    assert profile.peak is None
    assert "profiler format" in profile.problem


def test_peak_of_a_real_step_matches_hand_count() -> None:
    """y = x W, sum, backward: W and x are there before; y and the gradient of W are added."""
    weight = torch.randn(256, 256, requires_grad=True)
    x = torch.randn(64, 256)
    with AllocationProfile(alive_before=4 * (256 * 256 + 64 * 256)) as profile:
        (x @ weight).sum().backward()
    own = 4 * (64 * 256 + 256 * 256)  # y and the gradient of W
    scalars = 64 * 8  # the sum and its gradient
    expected = 4 * (256 * 256 + 64 * 256) + own
    # backward of the product may make its contiguous copy of the gradient of y
    assert expected <= profile.peak <= expected + 4 * 64 * 256 + scalars


def test_error_in_the_step_gives_no_peak() -> None:
    profile = AllocationProfile(0)
    with pytest.raises(RuntimeError, match="boom"), profile:
        raise RuntimeError("boom")
    assert profile.peak is None


def test_live_bytes_of_weights_buffers_gradients_and_states() -> None:
    model = nn.Sequential(nn.Linear(10, 20), nn.BatchNorm1d(20))
    weights = 4 * (10 * 20 + 20 + 20 + 20)
    buffers = 4 * (20 + 20) + 8
    optimizer = torch.optim.AdamW(model.parameters(), fused=False)
    assert live_bytes(model, optimizer) == weights + buffers
    model(torch.randn(4, 10)).sum().backward()
    assert live_bytes(model, optimizer) == 2 * weights + buffers
    optimizer.step()
    # but for one float32 counter for each parameter, as in the plan's bytes
    assert live_bytes(model, optimizer) == 4 * weights + buffers


def test_live_bytes_include_master_copies() -> None:
    model = nn.Linear(10, 20, bias=False, dtype=torch.bfloat16)
    copy = nn.Parameter(model.weight.detach().float())
    assert live_bytes(model, torch.optim.SGD([copy], lr=1)) == (2 + 4) * 200


def test_shared_weights_are_counted_once() -> None:
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False))
    model[1].weight = model[0].weight
    assert live_bytes(model, torch.optim.SGD(model.parameters(), lr=1)) == 400


def test_memory_in_use_belongs_to_this_process() -> None:
    before = memory_in_use(torch.device("cpu"))
    block = torch.ones(64 * KB * KB, dtype=torch.uint8)
    grown = memory_in_use(torch.device("cpu")) - before
    assert 0.9 * block.numel() < grown < 1.5 * block.numel()
    with open("/proc/self/status") as file:
        resident = next(int(line.split()[1]) * KB for line in file if line.startswith("VmRSS"))
    assert memory_in_use(torch.device("cpu")) == pytest.approx(resident, rel=0.05)
