"""Devices that the rules are asked about."""

from eke.hardware import DEVICES, Device

CPU = Device("cpu", "test CPU", memory_bytes=2**34)
V100 = DEVICES["v100_16"]
H200 = DEVICES["h200"]
