"""One run on several machines: one task on each, of which the first one leads."""

from eke.launch.nodes.leader import Head
from eke.launch.nodes.run import LedRun, start_run
from eke.launch.nodes.worker_node import follow

__all__ = ["Head", "LedRun", "follow", "start_run"]
