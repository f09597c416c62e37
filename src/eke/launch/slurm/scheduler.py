"""SLURM commands and job states; an unanswered query decides nothing.

All states of slurm.h (22.05 to 25.05), https://slurm.schedmd.com/job_state_codes.html.
"""

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
"""On its nodes, or just leaving them. In another state that is not over, a job waits."""

OUT_OF_MEMORY = "OUT_OF_MEMORY"
"""Of the host's memory, which says nothing about a GPU's."""

OVER: dict[str, Outcome] = {
    "COMPLETED": Outcome.crashed,  # but without a record of ours
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
"""Waits for `scontrol release`."""


def is_running(state: str) -> bool:
    """Whether a job has its nodes."""
    return state in _RUNS


def is_over(state: str) -> bool:
    """Whether a job will not run again by itself."""
    return _word(state) in OVER


def outcome_of(state: str) -> Outcome:
    """Outcome of a run whose job ended in this state without a record."""
    return OVER.get(_word(state), Outcome.crashed)


def _word(state: str) -> str:
    """The state without the `+` and the reason that SLURM adds to some (`CANCELLED by 0`)."""
    return next(iter(state.split()), "").rstrip("+")


PATIENCE_S = 60.0
"""For an answer: a busy controller takes its time, and retries by itself for as long."""

DEFAULT_ARRAY_SIZE = 1001
"""MaxArraySize where SLURM does not say (slurm.conf's manual)."""

_DEFAULTS = r"SBATCH_(ACCOUNT|CONSTRAINT|PARTITION|QOS|RESERVATION|WCKEY|MEM_PER_(CPU|GPU|NODE))$"
"""The user's defaults for what a run may leave open: sbatch's arguments are stronger."""

_FOREIGN = re.compile(
    rf"SLURMD?_(?!(CONF|JWT)$)|SQUEUE_|SACCT_|SCONTROL_|SCANCEL_|SRUN_|(?!{_DEFAULTS})SBATCH_"
    rf"|{RANK_VARIABLES}"
)
"""Input variables of SLURM's commands (their manuals), of a surrounding job or the user's own: they
would hide jobs, add to what a run asks for (`SBATCH_GRES`, `SLURM_NTASKS`), contradict it
(`SBATCH_CPUS_PER_GPU`), or take from a job what it needs (`SBATCH_EXPORT`)."""

_LOST = re.compile(r"timed out|zero bytes|exit code -", re.I)
"""In sbatch's message when it is unknown whether the job was accepted."""

_OUT_OF_REACH = re.compile(
    r"establish a configuration source|fetch_config|contact slurm controller", re.I
)
"""In what commands of SLURM 22.05 say without a cluster, or when its controller is down."""

ELSEWHERE = "Submit from a login node, or leave hydra/launcher=slurm out to run here"


@dataclass(frozen=True)
class Element:
    """One job of an array, as the queue shows it."""

    state: str
    node: str
    name: str
    reason: str
    """SLURM's reason for waiting."""
    ids: tuple[str, ...]
    """SLURM's numbers of it, `123_4`, this one first: arrays of one name are one submission."""

    @property
    def key(self) -> str:
        """Name and index, `NAME_4`: numbers come again on a new cluster, and after MaxJobId."""
        return f"{self.name}_{self.ids[0].partition('_')[2]}"


class SaidNo(EkeError):
    """A command has answered, and its answer is an error."""


class SubmissionRefused(EkeError):
    """sbatch rejected the job; nothing was submitted."""

    @property
    def is_full(self) -> bool:
        """Whether the reason is a limit on jobs in the queue, so that waiting helps."""
        text = str(self)
        # "job submit limit, user's size and/or time limits" is printed for every limit; a line
        # before it, if the version has one, names it.
        if named := re.search(r"\b(Assoc|QOS)\w+", text, re.I):
            return "submit" in named.group().lower()
        return bool(re.search(r"job submit limit|MaxJobCount|temporarily|try again", text, re.I))

    @property
    def is_too_large(self) -> bool:
        """Whether fewer runs at once may work: a site's array limit that cannot be queried."""
        return bool(re.search(r"job array", str(self), re.I))


def ask(command: Sequence[str], descriptors: Sequence[int] = ()) -> str:
    """Output of a command that holds `descriptors`; SaidNo if rejected, EkeError if unanswered."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=PATIENCE_S, env=clean_environment(os.environ), pass_fds=descriptors,
        )  # fmt: skip
    except FileNotFoundError as error:
        why = "is not there: this machine knows no SLURM"
        raise EkeError(f"{command[0]} {why}. {ELSEWHERE}") from error
    except subprocess.TimeoutExpired as error:
        raise EkeError(f"{command[0]} gave no answer in {PATIENCE_S:g} s") from error
    except OSError as error:
        raise EkeError(f"{command[0]} cannot be started: {error.strerror or error}") from error
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        if _OUT_OF_REACH.search(said):
            last = said.splitlines()[-1].removeprefix(f"{command[0]}: ")
            raise SaidNo(f"{command[0]} reaches no SLURM controller ({last}). {ELSEWHERE}")
        raise SaidNo(f"{command[0]}: {said}")
    return done.stdout


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment without a surrounding job's or torchrun's variables."""
    return {key: value for key, value in environment.items() if not _FOREIGN.match(key)}


def options_of(script: Path) -> list[str]:
    """The options of a batch script, as arguments of sbatch."""
    # `SBATCH_PARTITION` and the like replace lines of a script, but no arguments (sbatch's manual).
    lines = script.read_text(encoding="utf-8").splitlines()
    asked = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]
    return [word for line in asked for word in shlex.split(line)]


def submit(script: Path, descriptors: Sequence[int] = ()) -> str:
    """Submit a batch script; returns the job id. SubmissionRefused, or EkeError without answer."""
    try:
        said = ask(["sbatch", "--parsable", *options_of(script), str(script)], descriptors)
    except SaidNo as error:
        if _LOST.search(str(error)):
            raise
        raise SubmissionRefused(str(error)) from error
    found = re.match(r"\d+", said.strip().splitlines()[-1] if said.strip() else "")
    if not found:
        raise EkeError(f"sbatch: {said.strip()!r} is no job id")
    return found.group()


def objection_to(text: str) -> str:
    """Objection of sbatch to a batch script (a dry run); empty if it would be accepted."""
    with tempfile.NamedTemporaryFile("w", suffix=".sbatch") as file:
        file.write(text)
        file.flush()
        try:
            ask(["sbatch", "--test-only", *options_of(Path(file.name)), file.name])
        except EkeError as error:
            return str(error)
    return ""


def queue() -> dict[str, Element]:
    """This user's jobs that wait or run, by `NAME_4`; EkeError without an answer."""
    return _joined(_listed())


def _listed(*options: str) -> list[Element]:
    """This user's jobs as squeue shows them."""
    form = "--format=%F|%K|%T|%N|%j|%r"
    user = f"--user={os.getuid()}"  # not by name: LOGNAME may be anything, and a container has none
    found = []
    for line in ask(["squeue", "--noheader", "--array", user, form, *options]).splitlines():
        job, index, state, node, name, reason = (line.split("|", 5) + [""] * 5)[:6]
        found.append(Element(state, node, name, reason, (f"{job}_{index}",)))
    return found


def _joined(listed: Iterable[Element]) -> dict[str, Element]:
    """Elements that are not over, each with the numbers of all of its name and index."""
    alive = [each for each in listed if not is_over(each.state)]
    # Of several arrays with one name the element that runs is shown, else the first.
    alive.sort(key=lambda e: (not is_running(e.state), len(e.ids[0]), e.ids[0]))
    found: dict[str, Element] = {}
    for each in alive:
        first = found.get(each.key)
        found[each.key] = replace(first, ids=first.ids + each.ids) if first else each
    return found


def last_states(elements: Sequence[str]) -> dict[str, str]:
    """The state of jobs that are missing from the queue, by `NAME_4`; unknown ones are absent."""
    if not elements:
        return {}
    names = sorted({element.rpartition("_")[0] for element in elements})
    found: list[tuple[str, str]] = []
    # The controller remembers a job for some minutes (MinJobAge). Accounting learns late.
    with contextlib.suppress(EkeError):
        found += [(each.key, each.state) for each in _remembered(names)]
    for job, name, state in _accounted(names):
        if is_over(state):
            found.append((f"{name}_{job.partition('_')[2]}", state))
    found.sort(key=lambda pair: is_over(pair[1]))  # of several arrays of one name
    return {key: state for key, state in reversed(found) if key in elements}


def _remembered(names: Sequence[str]) -> list[Element]:
    """Jobs of these names, also those that are over, by the controller; or EkeError."""
    return _listed("--states=all", f"--name={','.join(names)}")


def _accounted(names: Sequence[str]) -> list[list[str]]:
    """Number, name and state of each job of these names in accounting; none without an answer."""
    form = ["--noheader", "--parsable2", "--allocations", "--format=JobID,JobName,State"]
    asked = [f"--name={','.join(names)}", "--starttime=now-30days"]
    try:
        lines = ask(["sacct", *form, *asked]).splitlines()
    except EkeError:
        return []
    return [line.split("|") for line in lines if line.count("|") == 2]


def show_job(element: str) -> dict[str, str]:
    """The controller's information on one job; empty if unknown or unreachable."""
    try:
        shown = ask(["scontrol", "show", "job", "--oneliner", element]).partition("\n")[0]
    except EkeError:
        return {}
    return dict(word.split("=", 1) for word in shown.split() if "=" in word)


def jobs_of_names(names: Sequence[str]) -> dict[str, str]:
    """Job id of each name that SLURM has ever taken, absent others; EkeError without an answer."""
    if not names:  # no name at all would mean every job
        return {}
    numbers = {each.name: each.ids[0] for each in _remembered(names)}
    numbers = {name: job for job, name, _ in _accounted(names)} | numbers
    return {name: numbers[name].partition("_")[0] for name in names if name in numbers}


def max_array_size() -> int:
    """How many elements an array may have."""
    try:
        said = ask(["scontrol", "show", "config"])
    except EkeError:
        return DEFAULT_ARRAY_SIZE
    # max_array_tasks is one of SchedulerParameters: "bf_continue,max_array_tasks=20".
    found = re.findall(r"(?:MaxArraySize|max_array_tasks)\s*=\s*(\d+)", said)
    return max(1, min(map(int, found), default=DEFAULT_ARRAY_SIZE))


def cancel(elements: Sequence[Element]) -> None:
    """Ask SLURM to end jobs, which save first, within KillWait; EkeError without an answer."""
    if elements:
        ask(["scancel", *(number for each in elements for number in each.ids)])
