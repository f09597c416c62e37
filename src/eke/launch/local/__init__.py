"""A pool of devices on this machine, and the runs of a sweep on it; torch is never imported."""

from eke.launch.local.devices import Devices, find_devices
from eke.launch.local.dispatch import Pool, probe_in_pool

__all__ = ["Devices", "Pool", "find_devices", "probe_in_pool"]
