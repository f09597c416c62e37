"""Resource requests, batch scripts and the ledger of submissions.

The ledger is written before sbatch is called and completed when it has answered. A kill in between
leaves an intent, named by its runs: the next command first asks SLURM for a job of that name.
"""

import contextlib
import re
import secrets
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from eke.common.errors import ConfigError, EkeError, Fix, Problem
from eke.common.files import read_json, write_json
from eke.common.paths import RunPaths, source_folder, user_path
from eke.common.process_env import SAFE_PATH
from eke.config.schema import Config
from eke.config.schema.resources import GpuRequest, Slurm
from eke.launch.processes.nodes import ALONE_S
from eke.launch.processes.sweep import are_in_vain
from eke.plan.planner import Plan
from eke.plan.record import EXIT_RESUMABLE, RECORD_LIMIT

NAME = "slurm"
"""Of this launcher: option of `hydra/launcher`, its files and folders."""

PLACES = ("partition", "account", "qos", "constraint")
"""Fields of a request, which resources and the profile have, too."""

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<clock>\d+(?::\d+){0,2})", re.ASCII)
_MEMORY = re.compile(r"[0-9]+[KMGT]?B?", re.IGNORECASE)

_OPTION = re.compile(r"[a-z][a-z0-9-]*")
"""Long names of sbatch's options."""

_OWN = {
    **{name: "resources.time" for name in ("time", "time-min")},
    **{name: f"resources.{name}" for name in PLACES},
    "mem": "resources.memory",
    "cpus-per-task": "resources.cpus",
    **{name: "resources.gpus" for name in ("gpus", "gpus-per-node", "gres")},
    "signal": "slurm.grace_s",
    **{name: "distributed.num_processes" for name in ("ntasks", "ntasks-per-node")},
    "nodes": "distributed.num_nodes",
    **{name: "" for name in ("array", "error", "job-name", "no-requeue", "open-mode", "output")},
    **{name: "" for name in ("parsable", "requeue", "test-only", "wait", "wrap")},
}
"""Options of sbatch that eke sets, and the key that changes them; empty where none does."""


@dataclass(frozen=True)
class Request:
    """One job of an array, as SLURM is to see it."""

    minutes: int
    """Time limit."""
    gpus: int
    """On each node."""
    cpus: int
    """On each node."""
    nodes: int = 1
    memory: str = ""
    """Of each node, in sbatch's form; empty for the cluster's default, as are the others."""
    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""

    @property
    def gpu_hours(self) -> float:
        """At most, for one run."""
        return self.nodes * self.gpus * self.minutes / 60


def make_request(plan: Plan) -> Request:
    """Resources requested for this run; ConfigError for a value that sbatch would not read."""
    config, processes = plan.config, plan.processes_per_node * plan.batch.devices
    wanted, profile = config.resources, config.slurm
    if problems := _problems(config):
        raise ConfigError(problems)
    each = wanted.gpus if wanted.gpus is not None else int(plan.device.kind == "cuda")
    return Request(
        minutes=read_minutes(wanted.time) or 0,
        gpus=each * processes,
        cpus=wanted.cpus * processes,
        nodes=config.distributed.num_nodes,
        memory=wanted.memory or "",
        **{n: getattr(wanted, n) or getattr(profile, n) or "" for n in PLACES},
    )


def read_minutes(text: str) -> int | None:
    """A time limit of sbatch's (its manual, --time) in whole minutes, rounded up; else None."""
    if not (found := _TIME.fullmatch(text.strip())):
        return None
    parts = [int(part) for part in found["clock"].split(":")]
    if found["days"] is not None:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
        hours += 24 * int(found["days"])
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, (*parts, 0)[:2]
    return (hours * 3600 + minutes * 60 + seconds + 59) // 60 or None


def _problems(config: Config) -> list[Problem]:
    wanted, found = config.resources, []
    minutes = read_minutes(wanted.time)
    if minutes is None:
        why = "is no time limit of sbatch's: minutes, H:MM:SS or D-HH:MM:SS"
        found.append(Problem("resources.time", wanted.time, why, Fix("resources.time=2:00:00")))
    elif minutes * 60 <= config.slurm.grace_s:
        why = f"leaves no time before the last {config.slurm.grace_s} s, in which a run saves"
        fix = Fix(f"resources.time={config.slurm.grace_s // 60 + 5}")
        found.append(Problem("resources.time", wanted.time, why, fix))
    if wanted.memory and not _MEMORY.fullmatch(wanted.memory):
        why = "is no amount of memory: a number and K, M, G or T"
        found.append(Problem("resources.memory", wanted.memory, why, Fix("resources.memory=64G")))
    found += [
        Problem(path, repr(text), "goes into a line of the batch script and must be one line")
        for path, text in _lines_of(config)
        if re.search(r"[\x00-\x08\x0a-\x1f]", text)
    ]
    for name, value in config.slurm.options.items():
        if not _OPTION.fullmatch(name):
            why = "is no long name of an option of sbatch: letters, digits and dashes"
            found.append(Problem("slurm.options", repr(name), why))
        elif (key := _OWN.get(name)) is not None:
            why = "is set by eke" + (f", from {key}" if key else " itself")
            found.append(Problem(f"slurm.options.{name}", value, why, Fix(remark=key)))
    return found


def _lines_of(config: Config) -> list[tuple[str, str]]:
    """Values used in `#SBATCH` lines or commands, by key path."""
    profile = config.slurm
    texts = [(f"resources.{n}", getattr(config.resources, n) or "") for n in PLACES]
    texts += [(f"slurm.{n}", getattr(profile, n) or "") for n in (*PLACES, "gpu_type", "python")]
    texts += [("slurm.command_prefix", profile.command_prefix)]
    texts += [(f"slurm.{n}", text) for n in ("srun", "setup") for text in getattr(profile, n)]
    texts += [("paths.runs", str(user_path(config.paths.runs).absolute()))]
    return texts + [("slurm.options", f"{k}={v}") for k, v in profile.options.items()]


SUBMISSION_VERSION = 1


@dataclass(frozen=True)
class Submission:
    """One array: which element is which run."""

    name: str
    """Of the job: unlike any other."""
    runs: tuple[str, ...]
    """Run folders, by element of the array; absolute."""
    max_restarts: int
    """Times a run may be put back into the queue without a step more than before."""
    created: float
    """time.time() before sbatch was called."""
    job_id: str = ""
    """SLURM's number; empty while it is unknown whether sbatch accepted it."""


@dataclass(frozen=True)
class Ticket:
    """A run folder's entry for its newest job, or for the one being submitted."""

    submission: str
    """The submission's file."""
    element: int
    stalled: int = 0
    """Restarts since a step was made that had not been made before."""
    worths: list[Sequence[float]] = field(default_factory=list)
    """Of its attempts that were interrupted: see `eke.launch.processes.sweep.worth_of`."""

    @property
    def job(self) -> str:
        """Name and index of its job, `NAME_4`: its number may be another job's by now."""
        return f"{Path(self.submission).stem}_{self.element}"

    @property
    def log(self) -> Path:
        """Output of its job, outside its worker."""
        return Path(self.submission).with_name(f"{self.job}.log")

    def spent(self, max_restarts: int) -> str:
        """Why it is not requeued; empty if it is."""
        if self.stalled > max_restarts:
            return f"{self.stalled} times without a step more"
        return are_in_vain(self.worths, max_restarts)


def new_submission(sweep: str, runs: list[str], max_restarts: int) -> Submission:
    """A submission with a unique name."""
    name = f"eke-{sweep}-{secrets.token_hex(4)}"
    return Submission(name, tuple(runs), max_restarts, time.time())


def submission_file(folder: Path, submission: Submission) -> Path:
    """Its path in the sweep's folder."""
    return folder / f"{submission.name}.json"


def write_submission(path: Path, submission: Submission) -> None:
    """Write it atomically."""
    write_json(path, {"schema_version": SUBMISSION_VERSION, **asdict(submission)})


def read_submission(path: Path) -> Submission:
    """Read one back; raises EkeError if it cannot be read, or is of another version."""
    try:
        content: dict[str, Any] = dict(read_json(path))
        version = content.pop("schema_version", None)
        if version != SUBMISSION_VERSION:
            raise EkeError(f"{path}: version {version}, this eke reads {SUBMISSION_VERSION}")
        return Submission(**{**content, "runs": tuple(content["runs"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise EkeError(f"{path}: not a readable submission ({error})") from error


def with_job(path: Path, submission: Submission, job_id: str) -> Submission:
    """Note what SLURM calls it."""
    known = replace(submission, job_id=job_id)
    write_submission(path, known)
    return known


def name_in_runs(path: Path, submission: Submission) -> None:
    """Have each of its runs name an intent as its newest job."""
    for number, run in enumerate(submission.runs):
        with contextlib.suppress(FileNotFoundError):  # the run was deleted meanwhile
            write_ticket(RunPaths(Path(run)), Ticket(str(path), number))


def write_ticket(paths: RunPaths, ticket: Ticket) -> None:
    """Note a run's newest job in its folder."""
    write_json(paths.ticket(NAME), {**asdict(ticket), "run": paths.folder.name})


def read_ticket(paths: RunPaths) -> Ticket | None:
    """A run's newest job; None if missing, unreadable or another run's (a copied folder)."""
    try:
        content = dict(read_json(paths.ticket(NAME), RECORD_LIMIT, own=True))
        run, ticket = content.pop("run", paths.folder.name), Ticket(**content)
    except (OSError, ValueError, TypeError):
        return None
    is_valid = isinstance(ticket.submission, str) and isinstance(ticket.element, int)
    return ticket if is_valid and run == paths.folder.name else None


REQUEUE_CODE = 99
"""Exit code of a run's watcher that requeues its job."""

STRAGGLERS_S = int(ALONE_S) + 300
"""How long the tasks of a step may go on once one has ended: within ALONE_S, unless one died before
it could be heard of (its node has no such Python, say)."""

_AFTER = f"""\
code=$?
job="${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}"
if [ "$code" -eq {REQUEUE_CODE} ]; then
  code={EXIT_RESUMABLE}
  # A job that a user cancels, or that SLURM itself puts back, is no longer running by now.
  if scontrol show job -o "$job" | grep -Eq 'JobState=(RUNNING|SIGNALING)'; then
    scontrol requeue "$job" && sleep 60
  fi
fi
exit "$code\""""


def script_text(request: Request, profile: Slurm, name: str, submission: Path, count: int) -> str:
    """The batch script for sbatch, of an array of `count` runs."""
    from submitit.slurm import slurm

    python = profile.python or shlex.quote(sys.executable)
    words = f"{python} {SAFE_PATH} -u -m eke.launch.slurm.watcher {shlex.quote(str(submission))}"
    text: str = slurm._make_sbatch_string(  # submitit's own executors write theirs with it
        command=f"{profile.command_prefix} {words}".strip(),  # for srun
        folder=submission.parent,
        map_count=count,
        **sbatch_parameters(request, profile, name, submission.parent),
    )
    return text


def sbatch_parameters(request: Request, profile: Slurm, name: str, folder: Path) -> dict[str, Any]:
    """Arguments of submitit's for what a run asks for; what is empty is left to the cluster."""
    # SLURM replaces %a and the like wherever they are in a path; two are one.
    log = f"{str(folder).replace('%', '%%')}/{name}_%a.log"
    chosen: dict[str, Any] = {name: getattr(request, name) for name in PLACES}
    chosen["mem"] = request.memory
    options = {name: value if value else True for name, value in profile.options.items()}
    gpus = f"{profile.gpu_type}:{request.gpus}" if profile.gpu_type else request.gpus
    if request.gpus:
        is_gres = profile.gpu_request is GpuRequest.gres
        chosen |= {"gres": f"gpu:{gpus}"} if is_gres else {"gpus_per_node": gpus}
    # Into the script's own log, whatever name submitit has for it.
    srun = ["--output", log, "--open-mode=append", "--export=ALL"]
    srun += [f"--wait={STRAGGLERS_S}"] if request.nodes > 1 else []
    return {
        "job_name": name,
        "time": request.minutes,
        "nodes": request.nodes,
        "ntasks_per_node": 1,
        "cpus_per_task": request.cpus,
        "signal_delay_s": profile.grace_s,
        "array_parallelism": profile.max_parallel,
        "stderr_to_stdout": True,
        "setup": _setup(profile),
        "teardown": [_AFTER],
        "srun_args": [*srun, *profile.srun],
        # submitit would set its own wckey, which clusters that check them reject.
        "wckey": None,
        "additional_parameters": {"requeue": True, "output": log, **options},
        **{key: value for key, value in chosen.items() if value},
    }


def _setup(profile: Slurm) -> list[str]:
    source = shlex.quote(source_folder())
    return [
        # scancel reaches this shell, too: it has to stay until the run has saved.
        "trap : TERM",
        *profile.setup,
        # Whatever the lines above enabled: the lines after srun must run.
        "set +eu +o pipefail",
        # What is empty or relative in it stands for the folder where the command was started.
        "elsewhere() { local IFS=: each; set -f; "
        'for each in $PYTHONPATH; do [[ $each != /* ]] || printf :%s "$each"; done; }',
        f'export PYTHONSAFEPATH=1 PYTHONPATH={source}"$(elsewhere)"',
        # A step gets all of a job's cores only if requested (SLURM 22.05 and later).
        'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"',
    ]
