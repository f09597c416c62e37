"""A pool of devices on this machine, and the runs of a sweep on it; torch is never imported."""

from eke.launch.pool.board import open_board
from eke.launch.pool.devices import find_devices
from eke.launch.pool.dispatch import Pool
from eke.launch.pool.job import Job

__all__ = ["Job", "Pool", "find_devices", "open_board"]
