"""Detected devices and datasheets, without torch.

Input: `hardware=...` and this machine. Output: a `Device`, its free memory, and fingerprints.
Begin with `choose_device` and `DEVICES`.
"""

from eke.hardware.cpu import bfloat16_units, choose_device, detect, file_system, usable_cores
from eke.hardware.datasheets import DEVICES, Device, device_option
from eke.hardware.fingerprint import environment, machine_fingerprint, software_now, software_places
from eke.hardware.processes import (
    DeviceSlot,
    cpu_slots,
    free_bytes,
    gpu_slots,
    has_foreign_processes,
    processes_on,
    resident_bytes,
)
