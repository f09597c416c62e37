"""A pool of devices on this machine, and the runs of a sweep on it; torch is never imported."""

from eke.launch.local.devices import Devices, find_devices
from eke.launch.local.dispatch import Pool, forking, probe_in_pool, start_run

__all__ = ["Devices", "Pool", "find_devices", "forking", "probe_in_pool", "start_run"]
