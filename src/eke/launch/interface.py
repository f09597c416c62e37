"""Interface of a launcher, and the registry of all launchers."""

from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol, cast

from eke.common.errors import ConfigError, EkeError, Fix, Problem
from eke.common.files import is_trusted
from eke.common.paths import RunPaths, SweepPaths
from eke.common.plugins import LAUNCHERS, load_plugin, plugin_names
from eke.config.schema import Config, unused_cluster_overrides
from eke.hardware import Device, choose_device
from eke.launch.processes.run_dir import RunFolder, find_place
from eke.launch.processes.sweep import Job
from eke.launch.processes.sweep_scheduler import SweepState
from eke.plan.planner import Plan


class PlannedDevice(NamedTuple):
    """Device and nodes for which a run is planned."""

    device: Device
    reason: str
    num_nodes: int


class JobStatus(NamedTuple):
    """State of a submitted run, as reported by its launcher."""

    name: str
    """Name of the job for `cancel`. Empty if the job may not exist."""
    where: str = ""
    """Location, for display."""
    waits_for: str = ""
    """Reason for waiting, for display. Empty if the job does not wait."""
    silent: str = ""
    """Why the launcher could not read the state. Empty if it could."""


class StartedSweep(Protocol):
    """Runs of a sweep that a launcher has started."""

    def wait(self) -> bool:
        """Show the runs until all end. Return whether a stop signal arrived.

        Raises KeyboardInterrupt on Ctrl-C if the runs continue without this process.
        """

    def goes_on(self) -> bool:
        """Return whether runs continue, or wait, without this process."""
        return False

    def not_started(self) -> Sequence[Job]:
        """Return the runs that have no job yet. `waiting_for` of each has the reason."""
        return []


class Launcher(Protocol):
    """Starts the runs of a sweep on this machine, in a cluster or through another program.

    Subclasses implement `target` and `start`. A launcher whose runs can outlive its process also
    leaves a file `<name>.json` in each run's folder and implements `status` and `cancel`.
    """

    name: str
    """Option of `hydra/launcher`."""
    can_detach: bool = False
    """True if runs continue without the process that started them."""
    not_probed: str = ""
    """Why batch=auto cannot probe a micro-batch on this machine. Empty if it can."""
    trials_at_once: int = 1
    """Trials on GPUs that `eke fit` starts together."""
    reads_resources: bool = False
    """True if `resources` and a cluster's own group have an effect."""
    unused_keys: tuple[str, ...] = ()
    """Keys of `launcher` that have no effect."""

    def target(self, config: Config) -> PlannedDevice:
        """Return the device for which a run is planned. Raise ConfigError if it is not declared."""

    def start(self, books: SweepState, paths: SweepPaths, sweep: str) -> StartedSweep:
        """Start the sweep's runs without a final record. Raise EkeError if none can be started."""

    def unused(self, overrides: Sequence[str]) -> list[str]:
        """Return warnings about overrides that have no effect with this launcher."""
        of_clusters = [] if self.reads_resources else unused_cluster_overrides(overrides, self.name)
        starts = tuple(f"launcher.{key}=" for key in self.unused_keys)
        return of_clusters + [
            f"{text} has no effect with hydra/launcher={self.name}"
            for text in overrides
            if text.startswith(starts)
        ]

    def place_of(self, plan: Plan, old: Container[str] | None = None) -> RunFolder:
        """Return the folder of a run and the final record in it. `old` as in `find_place`."""
        return find_place(plan, old)

    def request(self, plan: Plan) -> Hashable:
        """Return a run's resources in hashable form. Raise ConfigError if they are invalid."""
        return None

    def preview(self, jobs: Sequence[Job], paths: SweepPaths, sweep: str) -> str:
        """Return the launch details for `plan_only=true`. Arguments as in `start`."""
        return ""

    def status(self, runs: Sequence[RunPaths]) -> Mapping[Path, JobStatus]:
        """Return the newest job by run folder. Folders without a job may be missing."""
        return {}

    def cancel(self, jobs: Sequence[str]) -> None:
        """Stop jobs, by their names in `status`, after saving. Raise EkeError if some may go on."""

    def log_of(self, paths: RunPaths) -> Path:
        """Return the log of a run, or the log of its job before the run began."""
        return paths.log


@cache
def find_launcher(name: str) -> Launcher:
    """Import the launcher of an option of `hydra/launcher`. Raise ConfigError if unknown."""
    found = load_plugin(LAUNCHERS, name)
    if found is None:
        why = f"no such launcher. Launchers: {', '.join(plugin_names(LAUNCHERS))}"
        raise ConfigError(Problem("hydra/launcher", name, why, id="unknown_option"))
    return cast(Launcher, found())


def launchers_of(paths: RunPaths) -> list[str]:
    """Return the names of the launchers that have left a file in a run's folder."""
    # Another user's file is ignored: it would name commands to run and jobs to cancel.
    return [name for name in plugin_names(LAUNCHERS) if is_trusted(paths.ticket(name))]


def job_statuses(runs: Iterable[RunPaths]) -> dict[Path, tuple[str, JobStatus]]:
    """Return launcher and status by run folder, with one query per launcher."""
    handed_over: dict[str, list[RunPaths]] = {}
    for paths in runs:
        for name in launchers_of(paths):
            handed_over.setdefault(name, []).append(paths)
    found: dict[Path, tuple[str, JobStatus]] = {}
    for name, theirs in handed_over.items():
        try:
            statuses = find_launcher(name).status(theirs)
        except EkeError as error:
            statuses = {paths.folder: JobStatus("", silent=str(error)) for paths in theirs}
        for folder, status in statuses.items():
            if status.name or folder not in found:
                found[folder] = name, status
    return found


def declared_target(config: Config, num_nodes: int = 1) -> PlannedDevice:
    """Return the target that `hardware` declares. Raise ConfigError if it declares none."""
    option = config.hardware.option
    found, _ = choose_device(option)
    if option == "auto" and found.kind == "cpu":
        why = "the devices of the nodes are unknown: this machine has no GPU"
        fix = Fix("hardware=h100", remark="or hardware=cpu")
        raise ConfigError(Problem("hardware", option, why, fix, "unknown_device"))
    is_gpu = found.kind == "cuda"
    note = f"{found.name}, declared by hardware={option}"
    count = config.distributed.processes_per_node if is_gpu else 1
    memory = found.memory_bytes if is_gpu else None  # the host memory of other machines is unknown
    device = replace(
        found, present=True, count=count, note=note, memory_bytes=memory, available_bytes=None,
        host_memory_bytes=None,
    )  # fmt: skip
    return PlannedDevice(device, note, num_nodes)
