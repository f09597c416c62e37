"""A pool of devices on this machine, and the runs of a sweep on it; torch is never imported."""

from eke.launch.pool.devices import find_devices
from eke.launch.pool.dispatch import Pool
from eke.launch.pool.probe import probe_in_pool

__all__ = ["Pool", "find_devices", "probe_in_pool"]
