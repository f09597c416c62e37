"""Devices: what this machine has, and what the datasheets say; importable without torch."""

from eke.hardware.cpu import bfloat16_units, usable_cores
from eke.hardware.datasheets import DEVICES, option_of
from eke.hardware.detect import choose, detect
from eke.hardware.device import Device
from eke.hardware.device_slots import DeviceSlot, cpu_slots, free_bytes, gpu_slots, processes_on
from eke.hardware.disk import file_system
from eke.hardware.environment import environment
from eke.hardware.fingerprint import machine_fingerprint, software_now, software_places
from eke.hardware.processes import foreign_processes, resident_bytes

__all__ = [
    "DEVICES",
    "Device",
    "DeviceSlot",
    "bfloat16_units",
    "choose",
    "cpu_slots",
    "detect",
    "environment",
    "file_system",
    "foreign_processes",
    "free_bytes",
    "gpu_slots",
    "machine_fingerprint",
    "option_of",
    "processes_on",
    "resident_bytes",
    "software_now",
    "software_places",
    "usable_cores",
]
