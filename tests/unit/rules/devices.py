"""Devices that the rules are asked about."""

import dataclasses

from eke.hardware import DEVICES, Device

CPU = Device("cpu", "test CPU", memory_bytes=2**34)
V100 = DEVICES["v100_16"]
H200 = DEVICES["h200"]

BY_NAME = {
    **DEVICES,
    "cpu": CPU,
    "older": dataclasses.replace(V100, capability=(6, 0)),
    "two_h200": dataclasses.replace(H200, count=2),
}
"""Second column of cases.txt -> device."""
