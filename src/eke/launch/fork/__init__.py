"""Workers forked from one process with everything imported, instead of started afresh."""

from eke.launch.fork.decide import Surroundings, modules_of, why_fresh
from eke.launch.fork.server import ForkServer

__all__ = ["ForkServer", "Surroundings", "modules_of", "why_fresh"]
