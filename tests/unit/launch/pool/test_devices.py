"""Devices are leased whole, to one run at a time, across pools and beyond a pool's death."""

import dataclasses
import errno
import fcntl
import os
import subprocess
import sys

import pytest

from eke.common.errors import EkeError
from eke.hardware.device_use import lease_folder
from eke.launch.devices import (
    find_devices,
    holder_of,
    try_lease,
    why_busy,
)


def test_run_gets_only_its_leased_devices(gpus) -> None:
    devices = gpus(4)
    first, second = devices.take(1), devices.take(2)
    assert first.environment()["CUDA_VISIBLE_DEVICES"] == "GPU-0"
    assert second.environment()["CUDA_VISIBLE_DEVICES"] == "GPU-1,GPU-2"
    assert (first.name, second.name) == ("GPU 0", "GPU 1,2")
    assert devices.take(2) is None, "one is left"
    first.release()
    third = devices.take(2)
    assert third.name == "GPU 0,3"


def test_two_pools_never_lease_the_same_device(gpus) -> None:
    one, other = gpus(2), gpus(2)
    grants = [one.take(1), other.take(1)]
    assert {grant.name for grant in grants} == {"GPU 0", "GPU 1"}
    assert one.take(1) is None
    assert one.why == "", "a pool does not wait for itself"
    grants[1].release()
    assert other.take(2) is None
    assert one.take(1).name == "GPU 1", "the other pool let go of what it could have had"


def test_shared_device_is_never_leased_twice_by_one_run(gpus) -> None:
    devices = gpus(2, runs_per_device=2)
    assert devices.count == 2
    first = devices.take(2)
    assert {slot.device for slot in first.slots} == {"GPU-0", "GPU-1"}
    assert devices.take(2).shared
    assert devices.take(1) is None


def test_freed_devices_are_gathered_for_a_large_run(gpus) -> None:
    devices, other = gpus(3), gpus(3)
    held = [devices.take(1), devices.take(1), devices.take(1)]
    assert devices.take(2, gather=True) is None
    held.pop().release()
    assert devices.take(2, gather=True) is None
    assert other.take(1) is None, "it is kept"
    held.pop().release()
    assert devices.take(2, gather=True).name == "GPU 2,1"


def test_two_gathering_pools_do_not_deadlock(gpus) -> None:
    one, other = gpus(2), gpus(2)
    held = one.take(1)
    assert one.take(2, gather=True) is None
    assert other.take(2, gather=True) is None
    held.release()
    assert other.take(2, gather=True) is None, "one gathers, and has half of it"
    assert one.take(2, gather=True) is not None


def test_gathered_devices_are_released_if_unused(gpus) -> None:
    one, other = gpus(2), gpus(2)
    held = one.take(1)
    assert one.take(2, gather=True) is None
    one.release_all()
    assert other.take(1) is not None
    held.release()


def test_busy_gpu_is_not_leased(gpus) -> None:
    devices = gpus(2, busy=lambda device: "used by process 4242" if device == "GPU-0" else "")
    assert devices.take(1).name == "GPU 1"
    assert devices.take(1) is None
    assert devices.why == "GPU 0 is used by process 4242"


def test_cpu_is_never_busy() -> None:
    assert why_busy("cpu-0") == ""


def test_lease_of_a_killed_pool_passes_to_its_worker(gpus, leases) -> None:
    """The worker has the lock's descriptor, too: the device is free when both are gone."""
    code = (
        "import subprocess, os\n"
        "from eke.launch.devices import try_lease\n"
        "lock = try_lease('GPU-0.0')\n"
        "null = subprocess.DEVNULL\n"
        "child = subprocess.Popen(['sleep', '60'], stdout=null, stderr=null, pass_fds=[lock])\n"
        "print(child.pid, flush=True)\n"
        "os._exit(0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ}, capture_output=True, text=True, check=True
    )
    worker = int(done.stdout)
    devices = gpus(1)
    assert devices.take(1) is None
    assert devices.why.startswith("GPU 0 is leased by process ")
    os.kill(worker, 9)
    for _ in range(1000):
        if (grant := devices.take(1)) is not None:
            break
    assert grant is not None


def test_lease_is_for_all_users_and_follows_no_link(leases) -> None:
    descriptor = try_lease("GPU-0")
    assert leases.stat().st_mode & 0o7777 == 0o1777
    assert (leases / "GPU-0.lock").stat().st_mode & 0o777 == 0o666
    assert holder_of("GPU-0") == f"process {os.getpid()}"
    os.close(descriptor)
    (lease_folder() / "GPU-1.lock").symlink_to(leases / "elsewhere")
    with pytest.raises(EkeError, match=r"link.*export EKE_LEASES="):
        try_lease("GPU-1")
    assert not (leases / "elsewhere").exists()


def test_lease_folder_is_independent_of_tmpdir(tmp_path, monkeypatch) -> None:
    """Two sweeps on a CPU would make each other slow, and neither would know."""
    everybodys = tmp_path / "everybodys"
    monkeypatch.setattr("eke.hardware.device_use._ALL_USERS", everybodys)
    monkeypatch.delenv("EKE_LEASES")
    for own in ("a", "b"):
        (tmp_path / own).mkdir()
        monkeypatch.setenv("TMPDIR", str(tmp_path / own))
        monkeypatch.setattr("tempfile.tempdir", None)
        assert lease_folder() == everybodys


def test_full_disk_prevents_leases(leases, monkeypatch) -> None:
    real_open = os.open

    def no_room(path, flags, *rest, **more) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return real_open(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", no_room)
    with pytest.raises(EkeError, match=r"GPU-0.lock: .*export EKE_LEASES="):
        try_lease("GPU-0")


def test_missing_locks_prevent_leases(leases, monkeypatch) -> None:
    def flock(*_) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(EkeError, match=r"export EKE_LEASES="):
        try_lease("GPU-0")
    assert len(os.listdir("/proc/self/fd")) == before


def test_runs_sharing_a_cpu_divide_its_threads(plan, monkeypatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    launcher = dataclasses.replace(plan.config.launcher, cpu_slots=2)
    config = dataclasses.replace(plan.config, launcher=launcher)
    devices = find_devices(dataclasses.replace(plan, config=config))
    grant = devices.take(1)
    assert grant.shared
    assert grant.environment() == {"OMP_NUM_THREADS": str(len(grant.slots[0].cores))}
    cores = grant.cores()
    assert grant.environment(len(cores)) == {"OMP_NUM_THREADS": "1"}, "shared out between ranks"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert grant.environment() == {}, "what the user has set counts"
    alone = find_devices(plan)
    assert (alone.take(1) is None) or not alone.shared


def test_missing_driver_gives_no_gpus(plan, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    device = dataclasses.replace(plan.device, kind="cuda")
    assert find_devices(dataclasses.replace(plan, device=device)).count == 0
