"""Runs of a sweep in a SLURM cluster; torch is never imported here."""

from eke.launch.slurm.dispatch import Cluster, describe_arrays
from eke.launch.slurm.run import place_in_cluster
from eke.launch.slurm.submission import make_request

__all__ = ["Cluster", "describe_arrays", "make_request", "place_in_cluster"]
