"""Resource requests, batch scripts and the ledger of submissions.

A submission is written before sbatch is called, and completed with the job id. If the process is
killed in between, an intent is left. The next command first queries SLURM for a job of its name.
"""

import contextlib
import re
import secrets
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from operator import mul
from pathlib import Path
from typing import Any

from eke.common.errors import ConfigError, EkeError, Fix, Problem
from eke.common.files import read_json, write_json
from eke.common.paths import RunPaths, source_folder, user_path
from eke.common.process_env import SAFE_PATH
from eke.config.schema import Config
from eke.config.schema.resources import GpuRequest, Slurm
from eke.launch.processes.multi_node import LOST_COORDINATOR_TIMEOUT_S
from eke.launch.processes.sweep import why_not_restart
from eke.plan.planner import Plan
from eke.plan.record import EXIT_RESUMABLE, RECORD_LIMIT

NAME = "slurm"
"""Name of this launcher: option of `hydra/launcher`, its files and folders."""

_PLACES = ("partition", "account", "qos", "constraint")
"""Fields of a request that resources and the profile also have."""

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<clock>\d+(?::\d+){0,2})", re.ASCII)
_MEMORY = re.compile(r"[0-9]+[KMGT]?B?", re.IGNORECASE)

_OPTION = re.compile(r"[a-z][a-z0-9-]*")
"""Long names of sbatch's options."""

_OWN = {
    **{name: "resources.time" for name in ("time", "time-min")},
    **{name: f"resources.{name}" for name in _PLACES},
    "mem": "resources.memory",
    "cpus-per-task": "resources.cpus",
    **{name: "resources.gpus" for name in ("gpus", "gpus-per-node", "gres")},
    "signal": "slurm.grace_s",
    **{name: "distributed.num_processes" for name in ("ntasks", "ntasks-per-node")},
    "nodes": "distributed.num_nodes",
    **{name: "" for name in ("array", "error", "job-name", "no-requeue", "open-mode", "output")},
    **{name: "" for name in ("parsable", "requeue", "test-only", "wait", "wrap")},
}
"""Options of sbatch that eke sets, and the key of their value. Empty without a key."""


@dataclass(frozen=True)
class Request:
    """SLURM resources of one job of an array."""

    minutes: int
    """Time limit in minutes."""
    gpus: int
    """GPUs per node."""
    cpus: int
    """CPU cores per node."""
    nodes: int = 1
    memory: str = ""
    """Memory per node in sbatch's form. Empty here and below: the cluster's default."""
    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""

    @property
    def gpu_hours(self) -> float:
        """Most GPU-hours of one run."""
        return self.nodes * self.gpus * self.minutes / 60


def make_request(plan: Plan) -> Request:
    """Return the resources of a run's job. Raise ConfigError for values that sbatch rejects."""
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
        **{n: getattr(wanted, n) or getattr(profile, n) or "" for n in _PLACES},
    )


def read_minutes(text: str) -> int | None:
    """Return a time limit of sbatch (manual, --time) in minutes, rounded up, None if invalid."""
    if not (found := _TIME.fullmatch(text.strip())):
        return None
    parts, days = [int(part) for part in found["clock"].split(":")], found["days"]
    units = (3600, 60, 1) if days is not None or len(parts) == 3 else (60, 1)
    seconds = int(days or 0) * 24 * 3600 + sum(map(mul, parts, units))
    return -(-seconds // 60) or None


def _problems(config: Config) -> list[Problem]:
    wanted, found = config.resources, []
    minutes = read_minutes(wanted.time)
    if minutes is None:
        why = "must be a time limit of sbatch: minutes, H:MM:SS or D-HH:MM:SS"
        fix = Fix("resources.time=2:00:00")
        found.append(Problem("resources.time", wanted.time, why, fix, "wrong_type"))
    elif minutes * 60 <= config.slurm.grace_s:
        why = f"must be longer than slurm.grace_s={config.slurm.grace_s}, the seconds for saving"
        fix = Fix(f"resources.time={config.slurm.grace_s // 60 + 5}")
        found.append(Problem("resources.time", wanted.time, why, fix, "limit"))
    if wanted.memory and not _MEMORY.fullmatch(wanted.memory):
        why, fix = "must be a number with K, M, G or T", Fix("resources.memory=64G")
        found.append(Problem("resources.memory", wanted.memory, why, fix, "wrong_type"))
    why = "must be one line: it is written into the batch script"
    found += [
        Problem(path, repr(text), why, id="wrong_type")
        for path, text in _lines_of(config)
        if re.search(r"[\x00-\x08\x0a-\x1f]", text)
    ]
    for name, value in config.slurm.options.items():
        if not _OPTION.fullmatch(name):
            why = "must be a long option of sbatch: letters, digits and dashes"
            found.append(Problem("slurm.options", repr(name), why, id="wrong_type"))
        elif (key := _OWN.get(name)) is not None:
            why = "is set by eke" + (f", from {key}" if key else " itself")
            found.append(Problem(f"slurm.options.{name}", value, why, Fix(remark=key), "fixed_key"))
    return found


def _lines_of(config: Config) -> list[tuple[str, str]]:
    """Return the values used in `#SBATCH` lines or commands, by key."""
    profile = config.slurm
    texts = [(f"resources.{n}", getattr(config.resources, n) or "") for n in _PLACES]
    texts += [(f"slurm.{n}", getattr(profile, n) or "") for n in (*_PLACES, "gpu_type", "python")]
    texts += [("slurm.command_prefix", profile.command_prefix)]
    texts += [(f"slurm.{n}", text) for n in ("srun", "setup") for text in getattr(profile, n)]
    texts += [("paths.runs", str(user_path(config.paths.runs).absolute()))]
    return texts + [("slurm.options", f"{k}={v}") for k, v in profile.options.items()]


_SUBMISSION_VERSION = 1


@dataclass(frozen=True)
class Submission:
    """One array, with its runs in the order of the elements."""

    name: str
    """Unique name of the job."""
    runs: tuple[str, ...]
    """Absolute paths of the run folders, by element of the array."""
    max_restarts: int
    """Number of requeues in a row without progress after which a run is not requeued."""
    created: float
    """time.time() before the call of sbatch."""
    job_id: str = ""
    """SLURM's job id. Empty while it is unknown whether sbatch accepted the job."""


@dataclass(frozen=True)
class JobEntry:
    """Entry in a run's folder for its newest job, or for the job being submitted."""

    submission: str
    """Path of the submission's file."""
    element: int
    stalled: int = 0
    """Restarts since the last progress."""
    worths: list[Sequence[float]] = field(default_factory=list)
    """`worth_of` of each interrupted attempt (eke.launch.processes.sweep)."""

    @property
    def job(self) -> str:
        """Name and index of the job, `NAME_4`. SLURM may have reused its number."""
        return f"{Path(self.submission).stem}_{self.element}"

    @property
    def log(self) -> Path:
        """Path of the job's output, apart from its worker's."""
        return Path(self.submission).with_name(f"{self.job}.log")

    def spent(self, max_restarts: int) -> str:
        """Return why the job is not requeued, "" if it is."""
        if self.stalled > max_restarts:
            return f"{self.stalled} restarts without progress"
        return why_not_restart(self.worths, max_restarts)


def new_submission(sweep: str, runs: list[str], max_restarts: int) -> Submission:
    """Return a new submission with a unique name."""
    name = f"eke-{sweep}-{secrets.token_hex(4)}"
    return Submission(name, tuple(runs), max_restarts, time.time())


def submission_file(folder: Path, submission: Submission) -> Path:
    """Return the path of a submission in the sweep's folder."""
    return folder / f"{submission.name}.json"


def write_submission(path: Path, submission: Submission) -> None:
    """Write a submission atomically."""
    write_json(path, {"schema_version": _SUBMISSION_VERSION, **asdict(submission)})


def read_submission(path: Path) -> Submission:
    """Return a submission from its file. Raise EkeError if unreadable or of another version."""
    try:
        content: dict[str, Any] = dict(read_json(path))
        version = content.pop("schema_version", None)
        if version != _SUBMISSION_VERSION:
            raise EkeError(f"{path}: version {version}, this eke reads {_SUBMISSION_VERSION}")
        return Submission(**{**content, "runs": tuple(content["runs"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise EkeError(f"{path}: not a readable submission ({error})") from error


def with_job(path: Path, submission: Submission, job_id: str) -> Submission:
    """Add SLURM's job id to a submission and its file."""
    known = replace(submission, job_id=job_id)
    write_submission(path, known)
    return known


def name_in_runs(path: Path, submission: Submission) -> None:
    """Write a submission into its runs' folders as their newest job."""
    for number, run in enumerate(submission.runs):
        with contextlib.suppress(FileNotFoundError):  # the run was deleted meanwhile
            write_ticket(RunPaths(Path(run)), JobEntry(str(path), number))


def write_ticket(paths: RunPaths, ticket: JobEntry) -> None:
    """Write a run's newest job into its folder."""
    write_json(paths.ticket(NAME), {**asdict(ticket), "run": paths.folder.name})


def read_ticket(paths: RunPaths) -> JobEntry | None:
    """Return a run's newest job, None if missing, unreadable or another run's (copied folder)."""
    try:
        content = dict(read_json(paths.ticket(NAME), RECORD_LIMIT, own=True))
        run, ticket = content.pop("run", paths.folder.name), JobEntry(**content)
    except (OSError, ValueError, TypeError):
        return None
    is_valid = isinstance(ticket.submission, str) and isinstance(ticket.element, int)
    return ticket if is_valid and run == paths.folder.name else None


REQUEUE_CODE = 99
"""Exit code of a run's watcher with which its job is requeued."""

_TASK_EXIT_TIMEOUT_S = int(LOST_COORDINATOR_TIMEOUT_S) + 300
"""Seconds that a step's tasks may outlive the first one, even one that ended unnoticed."""

_AFTER = f"""\
code=$?
job="${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}"
if [ "$code" -eq {REQUEUE_CODE} ]; then
  code={EXIT_RESUMABLE}
  # A job that was cancelled, or requeued by SLURM itself, is no longer running here.
  if scontrol show job -o "$job" | grep -Eq 'JobState=(RUNNING|SIGNALING)'; then
    scontrol requeue "$job" && sleep 60
  fi
fi
exit "$code\""""


def script_text(request: Request, profile: Slurm, name: str, submission: Path, count: int) -> str:
    """Return the batch script of an array of `count` runs."""
    from submitit.slurm import slurm

    python = profile.python or shlex.quote(sys.executable)
    words = f"{python} {SAFE_PATH} -u -m eke.launch.slurm.watcher {shlex.quote(str(submission))}"
    text: str = slurm._make_sbatch_string(  # also used by submitit's executors
        command=f"{profile.command_prefix} {words}".strip(),  # for srun
        folder=submission.parent,
        map_count=count,
        **_sbatch_parameters(request, profile, name, submission.parent),
    )
    return text


def _sbatch_parameters(request: Request, profile: Slurm, name: str, folder: Path) -> dict[str, Any]:
    """Return submitit's arguments for a request. Empty values are left to the cluster."""
    # SLURM expands %a and the like in a path. %% is a literal %.
    log = f"{str(folder).replace('%', '%%')}/{name}_%a.log"
    chosen: dict[str, Any] = {name: getattr(request, name) for name in _PLACES}
    chosen["mem"] = request.memory
    options = {name: value if value else True for name, value in profile.options.items()}
    gpus = f"{profile.gpu_type}:{request.gpus}" if profile.gpu_type else request.gpus
    if request.gpus:
        is_gres = profile.gpu_request is GpuRequest.gres
        chosen |= {"gres": f"gpu:{gpus}"} if is_gres else {"gpus_per_node": gpus}
    # Options of srun, whose output goes into the script's own log.
    srun = ["--output", log, "--open-mode=append", "--export=ALL"]
    srun += [f"--wait={_TASK_EXIT_TIMEOUT_S}"] if request.nodes > 1 else []
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
        # submitit's default wckey is rejected by clusters that check wckeys.
        "wckey": None,
        "additional_parameters": {"requeue": True, "output": log, **options},
        **{key: value for key, value in chosen.items() if value},
    }


def _setup(profile: Slurm) -> list[str]:
    source = shlex.quote(source_folder())
    return [
        # scancel also signals this shell. It must stay until the run has saved.
        "trap : TERM",
        *profile.setup,
        # The lines after srun must run, even if the lines above enabled errexit or nounset.
        "set +eu +o pipefail",
        # Drop empty and relative entries: they would be resolved in the current folder.
        "elsewhere() { local IFS=: each; set -f; "
        'for each in $PYTHONPATH; do [[ $each != /* ]] || printf :%s "$each"; done; }',
        f'export PYTHONSAFEPATH=1 PYTHONPATH={source}"$(elsewhere)"',
        # SLURM 22.05 and later give a step all of a job's cores only on request.
        'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"',
    ]
