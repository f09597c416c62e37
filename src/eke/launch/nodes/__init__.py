"""One run on several machines: one task on each, of which the first one leads."""

from eke.launch.nodes.follower import follow
from eke.launch.nodes.head import Head
from eke.launch.nodes.run import LedRun, start_run

__all__ = ["Head", "LedRun", "follow", "start_run"]
