"""Launcher `slurm`: runs as jobs, each submitted at most once and found again by its command."""

import contextlib
import sys
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from eke.common.errors import BusyError, EkeError
from eke.common.output import write_line
from eke.common.paths import RunPaths, SweepPaths
from eke.common.text import format_number
from eke.config.schema import Config
from eke.launch.interface import JobStatus, Launcher, PlannedDevice, StartedSweep, declared_target
from eke.launch.processes.run_dir import RunFolder, find_place
from eke.launch.processes.sweep import Job
from eke.launch.processes.sweep_scheduler import SweepState, has_final_record
from eke.launch.slurm import scheduler
from eke.launch.slurm.cluster_run import ClusterRun, changes_since_planning, stamp_of
from eke.launch.slurm.scheduler import HELD, Element, SubmissionRefused, is_over, is_running
from eke.launch.slurm.submission_file import (
    NAME,
    Request,
    make_request,
    new_submission,
    read_ticket,
    script_text,
    submission_file,
)
from eke.launch.slurm.submit_array import (
    PATIENCE_S,
    arrays,
    describe_request,
    freeze_run,
    resolve_pending_submissions,
    submit_array,
    submitting,
)
from eke.plan.planner import Plan
from eke.plan.record import Outcome

MAX_MISSING_POLLS = 3
"""Polls in a row without a job after which it is over: NFS shows a node's files with a delay."""


@dataclass
class Cluster(StartedSweep):
    """Runs of a sweep and their job arrays."""

    books: SweepState
    paths: SweepPaths
    sweep: str
    sleep: Callable[[float], None] = time.sleep
    elements: dict[int, str] = field(default_factory=dict)
    """Name and index of the job in SLURM, `NAME_4`, by number of the run."""
    missed: dict[int, int] = field(default_factory=dict)
    most: int = sys.maxsize
    """Largest number of runs per submission, halved while the queue is full and then doubled."""
    stamps: dict[int, int] = field(default_factory=dict)
    """Time of the record (ns) when the run was submitted here, by number of the run."""

    @property
    def folder(self) -> Path:
        """Folder of submissions, batch scripts and job logs."""
        return self.paths.launcher(NAME)

    def submit(self) -> None:
        """Submit the runs that are not done and have no job. Raise EkeError if impossible."""
        self.books.ledger.flush(at_once=True)  # before a job exists, as eke status reads it
        self.books.answer_from_records()
        if self.books.unfinished():
            with submitting(self.folder, PATIENCE_S, self.sleep) as lock:
                self.submit_missing(lock)
        for job in self.books.jobs:
            self.books.ledger.note(job)  # stores the folders
        self.books.ledger.flush(at_once=True)

    def submit_missing(self, lock: int) -> None:
        """Submit the runs without a job that fit into the queue. Record rejections of sbatch."""
        resolve_pending_submissions(self.folder, [*map(paths_of, self.not_started())], self.sleep)
        queue = scheduler.queue()
        for job in self.not_started():
            ticket = read_ticket(paths_of(job))
            if ticket and ticket.job in queue:  # submitted by an earlier command or another sweep
                self.elements[job.number] = ticket.job
        limit = scheduler.max_array_size()
        new = [job for job in self.not_started() if self.freeze(job)]
        refused: list[tuple[Job, SubmissionRefused]] = []
        for request, group in arrays(new, limit):
            try:
                self.submit_group(request, group, lock)
            except SubmissionRefused as error:
                if error.is_full:
                    for job in new:
                        job.waiting_for = "" if job.number in self.elements else str(error)
                    break
                missed = [job for job in group if job.number not in self.elements]
                refused += [(job, error) for job in missed]
        for said in dict.fromkeys(str(why) for _, why in refused):
            self.books.board.note(said)  # there is no summary if the command detaches
        for job, why in refused:
            self.books.end(job, Outcome.crashed, str(why))

    def submit_group(self, request: Request, group: list[Job], lock: int) -> None:
        """Submit runs with equal requests. Raise SubmissionRefused if not even one is accepted."""
        while group:
            now, group = group[: self.most], group[self.most :]
            try:
                submission = submit_array(self.folder, self.sweep, request, now, lock)
            except SubmissionRefused as error:
                if fewer := error.is_full or error.is_too_large:
                    self.most = max(1, len(now) // 2)
                if not fewer or len(now) == 1:
                    raise
                group = now + group
                continue
            self.most = min(2 * self.most, sys.maxsize)
            for number, job in enumerate(now):
                self.elements[job.number], job.waiting_for = f"{submission.name}_{number}", ""
            write_line(f"submitted {format_number(len(now), 'run')} as job {submission.job_id}")

    def freeze(self, job: Job) -> bool:
        """Write a run's plan. Return False if it is done, or another process holds it."""
        try:
            if self.books.answer(job, self.books.place_of(job.plan)):
                return False
            if job.number in self.stamps:
                return True
            freeze_run(job)
        except BusyError as error:
            job.waiting_for = str(error)
            return False
        except EkeError as error:
            self.books.fail(job, error)
            return False
        self.stamps[job.number] = stamp_of(paths_of(job))
        return True

    def wait(self) -> bool:
        """Show the runs until all are done. Ctrl-C raises KeyboardInterrupt and ends no job."""
        asked = 0.0
        while self.books.unfinished():
            poll_s = self.books.jobs[0].plan.config.slurm.poll_s
            if time.monotonic() - asked >= poll_s or not asked:
                asked = time.monotonic()
                self.look()
            self.books.ledger.flush()
            self.books.board.update(self.books.jobs)
            self.sleep(0.2)  # refresh interval of the display
        self.books.ledger.flush(at_once=True)
        return False

    def goes_on(self) -> bool:
        """Return whether jobs are in the queue, or runs are not yet submitted."""
        return bool(self.books.unfinished())

    def look(self) -> None:
        """Query all jobs at once, and update the runs. Without an answer, change no run."""
        try:
            queue = scheduler.queue()
        except EkeError as error:
            for job in self.books.unfinished():
                job.waiting_for = str(error)
            return
        lost = [job for job in self.books.unfinished() if self.follow(job, queue)]
        unclear = [self.elements[job.number] for job in lost if not self.run_of(job).tells_all()]
        states = scheduler.last_states(unclear)
        for job in lost:
            state = states.get(self.elements[job.number], "")
            if not state or is_over(state):
                self.collect(job, state)
        try:
            self.cancel_skipped(queue)
            if self.not_started():
                with contextlib.suppress(BusyError), submitting(self.folder) as lock:
                    self.submit_missing(lock)
        except EkeError as error:
            for job in self.not_started():
                job.waiting_for = str(error)

    def follow(self, job: Job, queue: dict[str, Element]) -> bool:
        """Apply the queue's state to a job. Return True if the job is over."""
        element = self.elements.get(job.number)
        if element is None:
            return False
        seen = queue.get(element)
        if seen is None:
            self.missed[job.number] = self.missed.get(job.number, 0) + 1
            return self.missed[job.number] >= MAX_MISSING_POLLS or has_final_record(
                Path(job.folder)
            )
        self.missed.pop(job.number, None)
        if not is_running(seen.state):
            self.note_waiting(job, seen)
            return False
        if job.live is None and seen.state != "COMPLETING":
            job.live, job.where = self.run_of(job), seen.node
            self.books.started(job)
        # The run does not wait for the end of SLURM's work on the job, such as an epilog.
        return has_final_record(Path(job.folder))

    def run_of(self, job: Job, state: str = "") -> ClusterRun:
        """Return a run with the last state of its job."""
        return ClusterRun(job.plan, paths_of(job), state, self.stamps.get(job.number, 0))

    def note_waiting(self, job: Job, seen: Element) -> None:
        """Mark a job as waiting in the queue, perhaps again."""
        if job.live is not None:
            job.live, job.lasted_s = None, job.lasted_s + time.monotonic() - job.started
        held = f"; scontrol release {seen.ids[0]}" if seen.state in HELD else ""
        job.waiting_for = _waits_for(seen) + held

    def collect(self, job: Job, state: str) -> None:
        """Read the record of a run whose job is over."""
        self.missed.pop(job.number, None)
        was_seen = job.live is not None
        try:
            record = self.run_of(job, state).finish()
        except BusyError as error:  # another job holds the run
            job.waiting_for = str(error)
            return
        except EkeError as error:
            job.end(Outcome.crashed, error.short())
        else:
            # A crashed run has been tried again by its watcher.
            final = Outcome[record.outcome] in (Outcome.crashed, Outcome.cancelled)
            ticket = read_ticket(paths_of(job))
            spent = ticket and ticket.spent(job.plan.config.slurm.max_restarts)
            self.books.settle(job, record, stopping=final or bool(spent))
        del self.elements[job.number]
        self.stamps.pop(job.number, None)
        if was_seen:
            self.books.left(job)
        else:
            self.books.board.ended(job)
            self.books.ledger.note(job)

    def cancel_skipped(self, queue: dict[str, Element]) -> None:
        """Cancel the jobs of skipped runs. They are tried again if SLURM does not answer."""
        skipped = {
            job.number: self.elements[job.number]
            for job in self.books.jobs
            if job.outcome is Outcome.skipped and self.elements.get(job.number, "") in queue
        }
        scheduler.cancel([queue[element] for element in skipped.values()])
        for number in skipped:
            del self.elements[number]

    def not_started(self) -> Sequence[Job]:
        """Return the jobs to be submitted."""
        return [job for job in self.books.unfinished() if job.number not in self.elements]


def _waits_for(seen: Element) -> str:
    """Return SLURM's reason for waiting, else the job's state."""
    reason = seen.reason if seen.reason not in ("", "None") else seen.state.lower()
    return f"job {seen.ids[0]}: {reason}"


def paths_of(job: Job) -> RunPaths:
    """Return the files of a job's run."""
    return RunPaths(Path(job.folder))


class SlurmLauncher(Launcher):
    """Starts runs as jobs of a SLURM cluster."""

    name = NAME
    can_detach = True
    not_probed = "the nodes are other machines"
    reads_resources = True
    unused_keys = ("cpu_slots", "runs_per_device", "prefix")
    trials_at_once = 3
    """Trials wait in the queue in waves. Trials on CPUs share a node's bandwidth and run singly."""

    def target(self, config: Config) -> PlannedDevice:
        """Return the device of the nodes that `hardware` declares."""
        return declared_target(config, config.distributed.num_nodes)

    def start(self, books: SweepState, paths: SweepPaths, sweep: str) -> Cluster:
        """Submit the runs. Errors as in `Cluster.submit`."""
        cluster = Cluster(books, paths, sweep)
        cluster.submit()
        return cluster

    def place_of(self, plan: Plan, old: Container[str] | None = None) -> RunFolder:
        """Return the folder of a run. Nodes may differ from the planning machine."""
        return find_place(plan, old, changes_since_planning)

    def request(self, plan: Plan) -> Request:
        """Return the resources of a run's job."""
        return make_request(plan)

    def preview(self, jobs: Sequence[Job], paths: SweepPaths, sweep: str) -> str:
        """Return every array with its batch script, and their GPU-hours. Errors as in `arrays`."""
        if not jobs:
            return ""
        parts, hours = [], 0.0
        found = arrays(jobs, scheduler.max_array_size())
        for request, group in found:
            profile = group[0].plan.config.slurm
            intent = new_submission(sweep, [], profile.max_restarts)
            path = submission_file(paths.launcher(NAME), intent).absolute()
            text = script_text(request, profile, intent.name, path, len(group))
            parts += [f"array of {describe_request(request, len(group), profile)}\n\n{text}"]
            if objection := scheduler.validate_script(text):
                parts += [f"sbatch --test-only: {objection}\n"]
            hours += request.gpu_hours * len(group)
        total = f"{format_number(len(jobs), 'run')} in {format_number(len(found), 'array')}"
        parts += [f"{total}, at most {hours:.1f} GPU-hours. Nothing was submitted"]
        return "\n".join(parts)

    def status(self, runs: Sequence[RunPaths]) -> dict[Path, JobStatus]:
        """Return the newest job of each run, with one call of squeue."""
        jobs = {paths.folder: ticket.job for paths in runs if (ticket := read_ticket(paths))}
        queue, problem = dict[str, Element](), ""
        try:
            queue = scheduler.queue() if jobs else {}
        except EkeError as error:
            problem = str(error).removesuffix(f". {scheduler.ELSEWHERE}")
        found = {}
        for folder, job in jobs.items():
            found[folder] = JobStatus("", where=f"job {job}", silent=problem)
            if seen := queue.get(job):
                where, waits_for = f"{seen.node}, job {seen.ids[0]}", _waits_for(seen)
                found[folder] = JobStatus(job, where, waits_for)
        return found

    def cancel(self, jobs: Sequence[str]) -> None:
        """Cancel all jobs of these names. Their runs save first, within KillWait."""
        queue = scheduler.queue()
        scheduler.cancel([queue[job] for job in jobs if job in queue])

    def log_of(self, paths: RunPaths) -> Path:
        """Return the log of the run's newest job."""
        ticket = read_ticket(paths)
        return ticket.log if ticket else paths.log
