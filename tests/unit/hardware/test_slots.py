"""Slots of devices: what is free of the memory behind each."""

import pytest

from eke.hardware import cpu_slots, free_bytes, gpu_slots

MIB = 2**20


def test_free_gpu_memory_excludes_other_processes(machine):
    machine("NVIDIA H200", "NVIDIA H200").gpus[1].processes = [(4242, 1024 * MIB)]
    first, second = gpu_slots(1)
    assert free_bytes(first) == 81920 * MIB
    assert free_bytes(second) == 80896 * MIB


@pytest.mark.parametrize("broken", ["init", ""], ids=["no driver", "unified memory"])
def test_missing_driver_answer_gives_unknown_free_memory(machine, broken):
    machine("NVIDIA GB10", memory_mib=None)
    (slot,) = gpu_slots(1)
    machine("NVIDIA GB10", memory_mib=None, broken=broken)
    assert free_bytes(slot) is None


def test_free_cpu_memory_comes_from_the_kernel(monkeypatch):
    monkeypatch.setattr("eke.hardware.processes.memory_available", lambda: 3 * MIB)
    assert [free_bytes(slot) for slot in cpu_slots(2)] == [3 * MIB, 3 * MIB]


def test_every_gpu_slice_is_a_slot(machine):
    """Each run of a sweep sees one: CUDA_VISIBLE_DEVICES names it by its UUID."""
    fake = machine("a", "b", slices=[("a", "MIG-7", 4864), ("a", "MIG-8", 9728)])
    fake.sliced = {"GPU-0a7f-0"}
    for piece in fake.slices:
        piece.parent = "GPU-0a7f-0"
    assert [slot.device for slot in gpu_slots(1)] == ["MIG-7", "MIG-8", "GPU-1a7f-1"]
    assert [free_bytes(slot) // MIB for slot in gpu_slots(1)] == [4864, 9728, 81920]


@pytest.mark.parametrize(("num_cores", "count"), [(8, 2), (8, 3), (4, 4)])
def test_cpu_slots_share_no_core(num_cores, count, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(num_cores)))
    cores = [core for slot in cpu_slots(count) for core in slot.cores]
    assert len(cores) == len(set(cores)) == count * (num_cores // count)


def test_surplus_cpu_slots_share_cores_and_a_single_slot_has_all(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {4, 5})
    assert [slot.cores for slot in cpu_slots(3)] == [(4,), (5,), (4,)]
    assert [slot.cores for slot in cpu_slots(1)] == [()]
