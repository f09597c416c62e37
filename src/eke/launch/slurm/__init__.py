"""Runs of a sweep in a SLURM cluster; torch is never imported here."""

from eke.launch.slurm.dispatch import Cluster
from eke.launch.slurm.dry_run import describe_arrays
from eke.launch.slurm.request import make_request
from eke.launch.slurm.run import place_in_cluster

__all__ = ["Cluster", "describe_arrays", "make_request", "place_in_cluster"]
