"""Jobs whose runs are scripted, devices that do not exist, locks of their own."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from unit.launch.scripted import QuietBoard, QuietLedger, record_for

from eke.common.errors import BusyError
from eke.common.paths import RunPaths
from eke.hardware import DeviceSlot
from eke.launch.devices import DeviceLease, Devices
from eke.launch.local import Pool
from eke.launch.processes.run_dir import RunFolder
from eke.launch.processes.sweep import Job
from eke.launch.processes.sweep_scheduler import SweepState
from eke.plan.record import Outcome, Record


@pytest.fixture(autouse=True)
def leases(tmp_path, monkeypatch) -> Path:
    """Locks that no other test holds."""
    monkeypatch.setenv("EKE_LEASES", str(tmp_path / "leases"))
    return tmp_path / "leases"


@pytest.fixture
def gpus() -> Callable[..., Devices]:
    """So many GPUs, by the names of the driver."""

    def make(count: int, runs_per_device: int = 1, **options) -> Devices:
        slots = [
            DeviceSlot(f"GPU {n}", f"GPU-{n}", f"GPU-{n}.{place}")
            for place in range(runs_per_device)
            for n in range(count)
        ]
        options.setdefault("busy", lambda device: "")
        return Devices(slots, shared=runs_per_device > 1, **options)

    return make


@dataclass
class FakeRun:
    """A run that lasts a number of looks and then ends as its script says."""

    paths: RunPaths
    record: Record
    looks: int
    grant: DeviceLease
    pid: int = 0
    signals: list[int] = field(default_factory=list)

    def is_over(self) -> bool:
        """One look less."""
        self.looks -= 1
        return self.looks < 0

    def ask(self, number: int) -> None:
        """Stops at once, saved."""
        self.signals.append(number)
        self.looks, self.record.outcome = 0, Outcome.preempted.name

    def kill(self) -> None:
        """Gone."""
        self.looks, self.record.outcome = 0, Outcome.crashed.name

    def finish(self) -> Record:
        """How it ended."""
        return self.record


@dataclass
class FakeMachine:
    """Starts scripted runs, and remembers which ran beside which."""

    tmp: Path
    ends: dict[str, deque] = field(default_factory=dict)
    """Run id -> (outcome, steps, looks) of each attempt; `ok` at once where there is none."""
    started: list[tuple[str, str]] = field(default_factory=list)
    """Run id and devices, in order."""
    finished: dict[str, Record] = field(default_factory=dict)
    busy: set[str] = field(default_factory=set)
    runs: list[FakeRun] = field(default_factory=list)

    def place_of(self, plan) -> RunFolder:
        """The run's folder, with a final record where there is one."""
        paths = RunPaths(self.tmp / "runs" / plan.run_id)
        return RunFolder(paths, self.finished.get(plan.run_id), "")

    def start(self, plan, paths: RunPaths, grant: DeviceLease) -> FakeRun:
        """Start what the script has for this run."""
        if plan.run_id in self.busy:
            self.busy.discard(plan.run_id)
            raise BusyError(f"run {plan.run_id} is in use by process 1")
        script = self.ends.get(plan.run_id) or deque([("ok", 20, 1)])
        outcome, steps, looks = script.popleft() if len(script) > 1 else script[0]
        self.started.append((plan.run_id, grant.name))
        run = FakeRun(paths, record_for(plan.run_id, outcome, steps), looks, grant)
        self.runs.append(run)
        return run


@pytest.fixture
def machine(tmp_path) -> FakeMachine:
    """Scripted runs."""
    return FakeMachine(tmp_path)


@pytest.fixture
def make_pool(machine, monkeypatch) -> Callable[..., Pool]:
    """A pool of these jobs and devices that does not sleep."""
    monkeypatch.setattr("eke.launch.local.POLL_S", 0)
    monkeypatch.setattr("eke.launch.local._RETRY_S", 0)
    monkeypatch.setattr("eke.launch.local._BUSY_S", 0)

    def make(jobs: list[Job], devices: Devices) -> Pool:
        books = SweepState(jobs, QuietBoard(), QuietLedger(), machine.place_of)
        return Pool(books, {"cuda": devices}, machine.start)

    return make
