"""A cluster that is not there: stubs of SLURM's commands, and a scheduler in memory."""

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import pytest
from unit.launch.scripted import QuietBoard, QuietLedger

from eke.common.errors import EkeError
from eke.common.paths import RunPaths, SweepPaths
from eke.config.schema.resources import Slurm
from eke.hardware import software_now, software_places
from eke.launch.processes.run_dir import RunFolder
from eke.launch.processes.sweep import Job
from eke.launch.processes.sweep_scheduler import SweepState
from eke.launch.slurm import cluster_run, scheduler
from eke.launch.slurm.dispatch import Cluster
from eke.launch.slurm.scheduler import Element
from eke.plan.planner import Plan
from eke.plan.record import Outcome, read_record

STUB = """\
#!/bin/sh
cd {folder}
printf '%s\\n' "{name} $*" >> calls
[ -f {name}.run ] && . ./{name}.run
[ -f {name}.out ] && cat {name}.out
[ -f {name}.err ] && cat {name}.err >&2
[ -f {name}.code ] && exit "$(cat {name}.code)"
echo "{name} was not expected" >&2
exit 99
"""


class Stubs:
    """SLURM's commands on PATH, which say what they are told to and note how they are called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for name in ("sbatch", "squeue", "sacct", "scontrol", "scancel", "srun"):
            self.write(name, STUB.format(folder=folder, name=name))

    def write(self, name: str, text: str) -> None:
        """Put a command there."""
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o755)

    def say(self, name: str, out: str = "", err: str = "", code: int = 0, run: str = "") -> None:
        """What a command answers from now on."""
        for kind, text in (("out", out), ("err", err), ("code", str(code)), ("run", run)):
            (self.folder / f"{name}.{kind}").write_text(text)

    def calls(self, name: str = "") -> list[str]:
        """Command lines so far, those of one program or all."""
        try:
            lines = (self.folder / "calls").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [line for line in lines if line.startswith(name)]


@pytest.fixture(autouse=True)
def stubs(tmp_path, monkeypatch) -> Stubs:
    """No test reaches a cluster that this machine may belong to."""
    made = Stubs(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{made.folder}{os.pathsep}/usr/bin{os.pathsep}/bin")
    return made


SOFTWARE, PLACES = cache(software_now), cache(software_places)


@pytest.fixture(autouse=True)
def same_software(monkeypatch) -> None:
    """It is looked up once for all tests: a submission reads every file of eke."""
    monkeypatch.setattr(cluster_run, "software_now", SOFTWARE)
    monkeypatch.setattr(cluster_run, "software_places", PLACES)


@pytest.fixture
def unfrozen(monkeypatch) -> list[Job]:
    """Jobs whose plans would have been written; that takes as long as all else here."""
    found: list[Job] = []

    def freeze(job: Job) -> None:
        Path(job.folder).mkdir(parents=True, exist_ok=True)
        found.append(job)

    monkeypatch.setattr("eke.launch.slurm.dispatch.freeze_run", freeze)
    return found


@pytest.fixture
def plan_with(plan) -> Callable[..., Plan]:
    """The plan with other values of `resources`, `slurm`, `paths`: `{"slurm.qos": "long"}`."""

    def make(values=None, processes: int = 1, kind: str = "cpu") -> Plan:
        config = copy.deepcopy(plan.config)
        config.slurm = Slurm()
        for path, value in (values or {}).items():
            section, _, name = path.partition(".")
            setattr(getattr(config, section), name, value)
        batch = replace(plan.batch, world_size=processes)
        device = replace(plan.device, kind=kind)
        return replace(plan, config=config, batch=batch, device=device)

    return make


@dataclass
class Scheduler:
    """A cluster in memory."""

    now: dict[str, Element] = field(default_factory=dict)
    """The queue."""
    ended: dict[str, str] = field(default_factory=dict)
    """Last states."""
    submitted: list[int] = field(default_factory=list)
    """Sizes of arrays."""
    names: dict[str, str] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    """Questions, by name."""
    down: str = ""
    """Why it gives no answer."""
    refusal: str = ""
    """What sbatch says."""
    refuses: str = ""
    """Text of the batch scripts that it says so of; empty for all."""
    room: int = 10**6
    """Jobs that the queue takes before it refuses."""
    array_size: int = 1001
    """What `scontrol show config` says of arrays."""
    largest: int = 10**6
    """Jobs that an array may have, whatever that says."""

    def _ask(self, name: str) -> None:
        self.asked.append(name)
        if self.down:
            raise EkeError(self.down)

    def queue(self) -> dict[str, Element]:
        """All jobs."""
        self._ask("queue")
        return scheduler._joined(self.now.values())

    def number(self, element: str) -> str:
        """SLURM's number of an element `NAME_4`: `100_4`."""
        name, _, index = element.rpartition("_")
        return f"{self.names[name]}_{index}"

    def numbers(self, made: Cluster) -> dict[int, str]:
        """SLURM's numbers of a sweep's jobs."""
        return {number: self.number(element) for number, element in made.elements.items()}

    def submit(self, script: Path, descriptors=()) -> str:
        """An array."""
        self._ask("submit")
        text = script.read_text()
        count = int(text.split("--array=0-")[1].split("%")[0].strip("'")) + 1
        name = text.split("--job-name=")[1].split("\n")[0].strip("'")
        if self.refusal and self.refuses in text:
            raise scheduler.SubmissionRefused(self.refusal)
        if len(self.now) + count > self.room:
            raise scheduler.SubmissionRefused("sbatch: error: QOSMaxSubmitJobPerUserLimit")
        if count > self.largest:
            raise scheduler.SubmissionRefused("sbatch: error: Invalid job array specification")
        job = str(100 + len(self.submitted))
        self.submitted.append(count)
        self.names[name] = job
        for number in range(count):
            self.put(f"{job}_{number}", "PENDING", name=name)
        return job

    def put(self, element: str, state: str, reason: str = "None", name: str = "") -> None:
        """A job in this state; of the submission that its number is of, unless it has a `name`."""
        submissions = {number: each for each, number in self.names.items()}
        name = name or submissions.get(element.partition("_")[0], "")
        node = "n1" if state != "PENDING" else ""
        self.now[element] = Element(state, node, name, reason, (element,))

    def end(self, element: str, state: str) -> None:
        """Out of the queue."""
        del self.now[element]
        self.ended[element] = state

    def last_states(self, elements) -> dict[str, str]:
        """Of those that anybody remembers."""
        if elements:
            self.asked.append("last_states")
        return {e: self.ended[n] for e in elements if (n := self.number(e)) in self.ended}

    def jobs_of_names(self, names) -> dict[str, str]:
        """Of those that were taken."""
        if not names:
            return {}
        self._ask("names")
        return {name: self.names[name] for name in names if name in self.names}

    def max_array_size(self) -> int:
        """A limit."""
        return self.array_size

    def cancel(self, elements) -> None:
        """Take them away."""
        if elements:
            self._ask("cancel")
        self.cancelled += [number for each in elements for number in each.ids]


@pytest.fixture
def cluster(monkeypatch) -> Scheduler:
    """In place of SLURM's commands."""
    made = Scheduler()
    for name in ("queue", "submit", "last_states", "jobs_of_names", "max_array_size", "cancel"):
        monkeypatch.setattr(scheduler, name, getattr(made, name))
    return made


class Finished:
    """Final records, by run id."""

    def __init__(self, tmp: Path) -> None:
        self.tmp, self.records = tmp, {}

    def place_of(self, plan: Plan) -> RunFolder:
        """The run's folder, with its final record where there is one."""
        paths = RunPaths(self.tmp / "runs" / plan.run_id)
        record = self.records.get(plan.run_id) or read_record(paths)
        final = record is not None and Outcome[record.outcome].is_final
        return RunFolder(paths, record if final else None, "")


@pytest.fixture
def machine(tmp_path) -> Finished:
    """Where runs are."""
    return Finished(tmp_path)


@pytest.fixture
def jobs_here(make_jobs, tmp_path) -> Callable[[int], list[Job]]:
    """So many jobs, with folders."""

    def make(count: int) -> list[Job]:
        jobs = make_jobs(*[1] * count)
        for job in jobs:
            job.folder = str(tmp_path / "runs" / job.plan.run_id)
        return jobs

    return make


@pytest.fixture
def submitted(jobs_here, machine, cluster, tmp_path):
    """So many jobs in the queue."""

    def make(count: int = 1, name: str = "0123456789ab") -> Cluster:
        books = SweepState(jobs_here(count), QuietBoard(), QuietLedger(), machine.place_of)
        paths = SweepPaths(tmp_path / "runs" / f"sweep-{name}")
        made = Cluster(books, paths, name, sleep=pytest.fail)
        made.submit()
        return made

    return make
