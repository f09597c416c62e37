"""SLURM commands and job states (slurm.h, 22.05 to 25.05). An unanswered query changes no state."""

import contextlib
import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from eke.common.errors import EkeError
from eke.common.process_env import RANK_VARIABLES
from eke.plan.record import Outcome

_RUNS = (
    "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING",
    "UPDATE_DB",
)  # fmt: skip
"""States with nodes (https://slurm.schedmd.com/job_state_codes.html). In others, a job waits."""

OUT_OF_MEMORY = "OUT_OF_MEMORY"
"""State of a job that ran out of host memory, unrelated to GPU memory."""

_OVER: dict[str, Outcome] = {
    "COMPLETED": Outcome.crashed,  # without a record
    "FAILED": Outcome.crashed,
    "LAUNCH_FAILED": Outcome.crashed,
    OUT_OF_MEMORY: Outcome.crashed,
    "CANCELLED": Outcome.cancelled,
    "REVOKED": Outcome.cancelled,
    "TIMEOUT": Outcome.timeout,
    "DEADLINE": Outcome.timeout,
    "PREEMPTED": Outcome.preempted,
    "NODE_FAIL": Outcome.preempted,
    "BOOT_FAIL": Outcome.preempted,
}
"""Outcome of a run without a record, by its job's last state."""

HELD = ("REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
"""States that last until `scontrol release`."""


def is_running(state: str) -> bool:
    """Return whether a job has its nodes."""
    return state in _RUNS


def is_over(state: str) -> bool:
    """Return whether a job will not run again by itself."""
    return _word(state) in _OVER


def outcome_of(state: str) -> Outcome:
    """Return the outcome of a run without a record, by the last state of its job."""
    return _OVER.get(_word(state), Outcome.crashed)


def _word(state: str) -> str:
    """Return the state without SLURM's `+` or reason, as in `CANCELLED by 0`."""
    return next(iter(state.split()), "").rstrip("+")


PATIENCE_S = 60.0
"""Time limit of a command in seconds. A busy controller is slow, and commands retry as long."""

DEFAULT_ARRAY_SIZE = 1001
"""MaxArraySize if SLURM does not report it (slurm.conf's manual)."""

_DEFAULTS = r"SBATCH_(ACCOUNT|CONSTRAINT|PARTITION|QOS|RESERVATION|WCKEY|MEM_PER_(CPU|GPU|NODE))$"
"""Names of the user's defaults for values that a run leaves open. Arguments override them."""

_FOREIGN = re.compile(
    rf"SLURMD?_(?!(CONF|JWT)$)|SQUEUE_|SACCT_|SCONTROL_|SCANCEL_|SRUN_|(?!{_DEFAULTS})SBATCH_"
    rf"|{RANK_VARIABLES}"
)
"""Input variables of SLURM's commands (see their manuals), set by an enclosing job or the user.
They would hide jobs, add to a run's resources (`SBATCH_GRES`, `SLURM_NTASKS`), contradict them
(`SBATCH_CPUS_PER_GPU`), or hide variables from a job (`SBATCH_EXPORT`)."""

_LOST = re.compile(r"timed out|zero bytes|exit code -", re.I)
"""Messages of sbatch after which it is unknown whether the job was accepted."""

_OUT_OF_REACH = re.compile(
    r"establish a configuration source|fetch_config|contact slurm controller", re.I
)
"""Messages of SLURM 22.05 without a cluster, or with its controller down."""

ELSEWHERE = "Submit from a login node, or run here without hydra/launcher=slurm"


@dataclass(frozen=True)
class Element:
    """One job of an array in the queue."""

    state: str
    node: str
    name: str
    reason: str
    """SLURM's reason for waiting."""
    ids: tuple[str, ...]
    """Job ids, `123_4`, with this array's first. Arrays of one name are one submission."""

    @property
    def key(self) -> str:
        """Name and index, `NAME_4`. SLURM reuses numbers on a new cluster and after MaxJobId."""
        return f"{self.name}_{self.ids[0].partition('_')[2]}"


class _SlurmCommandError(EkeError):
    """A command has answered with an error."""

    id = "failed_command"


class SubmissionRefused(EkeError):
    """sbatch has rejected the job. Nothing was submitted."""

    id = "rejected_job"

    @property
    def is_full(self) -> bool:
        """True if the reason is a limit on jobs in the queue, so that waiting helps."""
        text = str(self)
        # "job submit limit, user's size and/or time limits" is printed for every limit. Some
        # versions name the limit in a line before it.
        if named := re.search(r"\b(Assoc|QOS)\w+", text, re.I):
            return "submit" in named.group().lower()
        return bool(re.search(r"job submit limit|MaxJobCount|temporarily|try again", text, re.I))

    @property
    def is_too_large(self) -> bool:
        """True if fewer runs per array may work: a site's array limit that cannot be queried."""
        return bool(re.search(r"job array", str(self), re.I))


def run_slurm_command(command: Sequence[str], descriptors: Sequence[int] = ()) -> str:
    """Return a command's output. Raise EkeError if it fails or does not answer."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=PATIENCE_S, env=clean_environment(os.environ), pass_fds=descriptors,
        )  # fmt: skip
    except FileNotFoundError as error:
        why = "not found: SLURM is not installed on this machine"
        raise EkeError(f"{command[0]}: {why}. {ELSEWHERE}") from error
    except subprocess.TimeoutExpired as error:
        raise EkeError(f"{command[0]} did not answer within {PATIENCE_S:g} s") from error
    except OSError as error:
        raise EkeError(f"{command[0]} cannot be started: {error.strerror or error}") from error
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        if _OUT_OF_REACH.search(said):
            last = said.splitlines()[-1].removeprefix(f"{command[0]}: ")
            why = f"cannot reach a SLURM controller ({last}). {ELSEWHERE}"
            raise _SlurmCommandError(f"{command[0]} {why}")
        raise _SlurmCommandError(f"{command[0]}: {said}")
    return done.stdout


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without variables of an enclosing job or of torchrun."""
    return {key: value for key, value in environment.items() if not _FOREIGN.match(key)}


def _options_of(script: Path) -> list[str]:
    """Return the `#SBATCH` options of a batch script as arguments of sbatch."""
    # Variables such as `SBATCH_PARTITION` override lines of a script, but not arguments.
    lines = script.read_text(encoding="utf-8").splitlines()
    asked = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]
    return [word for line in asked for word in shlex.split(line)]


def submit(script: Path, descriptors: Sequence[int] = ()) -> str:
    """Submit a batch script and return the job id. Raise SubmissionRefused, or EkeError."""
    try:
        command = ["sbatch", "--parsable", *_options_of(script), str(script)]
        said = run_slurm_command(command, descriptors)
    except _SlurmCommandError as error:
        if _LOST.search(str(error)):
            raise
        raise SubmissionRefused(str(error)) from error
    found = re.match(r"\d+", said.strip().splitlines()[-1] if said.strip() else "")
    if not found:
        raise EkeError(f"sbatch: {said.strip()!r} is not a job id")
    return found.group()


def validate_script(text: str) -> str:
    """Return sbatch's objection to a batch script (a dry run), "" if there is none."""
    with tempfile.NamedTemporaryFile("w", suffix=".sbatch") as file:
        file.write(text)
        file.flush()
        try:
            run_slurm_command(["sbatch", "--test-only", *_options_of(Path(file.name)), file.name])
        except EkeError as error:
            return str(error)
    return ""


def queue() -> dict[str, Element]:
    """Return this user's waiting and running jobs by `NAME_4`, else raise EkeError."""
    return _joined(_listed())


def _joined(listed: Iterable[Element]) -> dict[str, Element]:
    alive = [each for each in listed if not is_over(each.state)]
    # Of several arrays with one name, show the running element, else the first, with all ids.
    alive.sort(key=lambda e: (not is_running(e.state), len(e.ids[0]), e.ids[0]))
    found: dict[str, Element] = {}
    for each in alive:
        first = found.get(each.key)
        found[each.key] = replace(first, ids=first.ids + each.ids) if first else each
    return found


def _listed(*options: str) -> list[Element]:
    form = "--format=%F|%K|%T|%N|%j|%r"
    user = f"--user={os.getuid()}"  # LOGNAME may be wrong, and a container may have no user names
    said = run_slurm_command(["squeue", "--noheader", "--array", user, form, *options])
    found = []
    for line in said.splitlines():
        job, index, state, node, name, reason = (line.split("|", 5) + [""] * 5)[:6]
        found.append(Element(state, node, name, reason, (f"{job}_{index}",)))
    return found


def last_states(elements: Sequence[str]) -> dict[str, str]:
    """Return the states of jobs missing from the queue by `NAME_4`, without unknown jobs."""
    if not elements:
        return {}
    names = sorted({element.rpartition("_")[0] for element in elements})
    found: list[tuple[str, str]] = []
    # The controller keeps a job for some minutes (MinJobAge). Accounting lags behind.
    with contextlib.suppress(EkeError):
        found += [(each.key, each.state) for each in _remembered(names)]
    for job, name, state in _query_accounting(names):
        if is_over(state):
            found.append((f"{name}_{job.partition('_')[2]}", state))
    found.sort(key=lambda pair: is_over(pair[1]))  # of several arrays of one name
    return {key: state for key, state in reversed(found) if key in elements}


def _remembered(names: Sequence[str]) -> list[Element]:
    """Return the controller's jobs of these names, also ended jobs, else raise EkeError."""
    return _listed("--states=all", f"--name={','.join(names)}")


def _query_accounting(names: Sequence[str]) -> list[list[str]]:
    """Return number, name and state of each job of these names in accounting, [] on failure."""
    form = ["--noheader", "--parsable2", "--allocations", "--format=JobID,JobName,State"]
    asked = [f"--name={','.join(names)}", "--starttime=now-30days"]
    try:
        lines = run_slurm_command(["sacct", *form, *asked]).splitlines()
    except EkeError:
        return []
    return [line.split("|") for line in lines if line.count("|") == 2]


def show_job(element: str) -> dict[str, str]:
    """Return the controller's data on one job, {} if unknown or unreachable."""
    try:
        said = run_slurm_command(["scontrol", "show", "job", "--oneliner", element])
    except EkeError:
        return {}
    shown, _, _ = said.partition("\n")
    return dict(word.split("=", 1) for word in shown.split() if "=" in word)


def jobs_of_names(names: Sequence[str]) -> dict[str, str]:
    """Return the job id of each name known to SLURM. Raise EkeError without an answer."""
    if not names:  # an empty list would select every job
        return {}
    numbers = {each.name: each.ids[0] for each in _remembered(names)}
    numbers = {name: job for job, name, _ in _query_accounting(names)} | numbers
    return {name: numbers[name].partition("_")[0] for name in names if name in numbers}


def max_array_size() -> int:
    """Return the largest number of elements of an array."""
    try:
        said = run_slurm_command(["scontrol", "show", "config"])
    except EkeError:
        return DEFAULT_ARRAY_SIZE
    # max_array_tasks is one of SchedulerParameters: "bf_continue,max_array_tasks=20".
    found = re.findall(r"(?:MaxArraySize|max_array_tasks)\s*=\s*(\d+)", said)
    return max(1, min(map(int, found), default=DEFAULT_ARRAY_SIZE))


def cancel(elements: Sequence[Element]) -> None:
    """Cancel jobs. They save first, within KillWait. Raise EkeError without an answer."""
    if elements:
        run_slurm_command(["scancel", *(number for each in elements for number in each.ids)])
