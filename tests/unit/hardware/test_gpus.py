"""What is read of GPUs, from a driver that answers what it is told to."""

import sys

from eke.hardware.nvidia import report_gpus

GIB = 2**30
H100 = "NVIDIA H100 80GB HBM3"


def test_gpu_report_reads_driver_values(machine) -> None:
    machine(H100, H100).gpus[1].processes = [(1, 2 * GIB)]
    report = report_gpus()
    assert (report.absent, report.driver, report.cuda_driver) == ("", "580.65.06", "13.1")
    first, second = report.gpus
    assert (second.memory_bytes, first.used_bytes, second.used_bytes) == (80 * GIB, 0, 2 * GIB)
    assert (first.power_w, first.power_limit_w, first.temperature_c) == (99.5, 700, 41)
    assert first.throttled_by == ("power cap", "hardware thermal"), "idle is no reason to worry"
    assert (first.num_processes, second.num_processes) == (0, 1)


def test_old_driver_library_leaves_gaps(machine, monkeypatch) -> None:
    fake = machine(H100)
    monkeypatch.delattr(type(fake), "nvmlDeviceGetCurrentClocksThrottleReasons")
    (gpu,) = report_gpus().gpus
    assert (gpu.throttled_by, gpu.sm_clock_mhz) == (None, None)


def test_missing_driver_is_reported(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert report_gpus().absent == "nvidia-ml-py is not installed"
