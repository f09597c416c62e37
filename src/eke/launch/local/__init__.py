"""Launcher `local`: a pool of this machine's devices."""

from eke.launch.local.devices import Devices, find_devices
from eke.launch.local.dispatch import LocalLauncher, Pool, probe_in_pool, start_run

__all__ = ["Devices", "LocalLauncher", "Pool", "find_devices", "probe_in_pool", "start_run"]
