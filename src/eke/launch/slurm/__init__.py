"""Launcher `slurm`: a sweep as job arrays of a cluster."""

from eke.launch.slurm.dispatch import SlurmLauncher
