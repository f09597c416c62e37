"""What runs ask SLURM for; runs that ask for the same go into one array."""

import re
from dataclasses import dataclass

from eke.common.errors import ConfigError, Problem
from eke.common.paths import user_path
from eke.config.schema import Config, Slurm
from eke.plan.planner import Plan

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<clock>\d+(?::\d+){0,2})", re.ASCII)
_MEMORY = re.compile(r"[0-9]+[KMGT]?B?", re.IGNORECASE)

_OPTION = re.compile(r"[a-z][a-z0-9-]*")
"""Long names of sbatch's options."""

_OWN = {
    **{name: "resources.time" for name in ("time", "time-min")},
    **{name: f"resources.{name}" for name in ("partition", "account", "qos", "constraint")},
    "mem": "resources.memory",
    "cpus-per-task": "resources.cpus",
    **{name: "resources.gpus" for name in ("gpus", "gpus-per-node", "gres")},
    "signal": "slurm.grace_s",
    **{name: "distributed.num_processes" for name in ("ntasks", "ntasks-per-node")},
    "nodes": "distributed.num_nodes",
    **{name: "" for name in ("array", "error", "job-name", "no-requeue", "open-mode", "output")},
    **{name: "" for name in ("parsable", "requeue", "test-only", "wait", "wrap")},
}
"""Options of sbatch that eke sets, and the key that changes them; empty where none does. Of an
option that is there twice, SLURM takes either: the ledger would say what is not so."""


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
    """What this run asks for.

    Raises:
        ConfigError: a value that sbatch would not read.
    """
    config, processes = plan.config, plan.processes_per_node * plan.batch.devices
    wanted, profile = config.resources, config.slurm
    problems = _problems(config)
    if problems:
        raise ConfigError(problems)
    each = wanted.gpus if wanted.gpus is not None else int(plan.device.kind == "cuda")
    return Request(
        minutes=read_minutes(wanted.time) or 0,
        gpus=each * processes,
        cpus=wanted.cpus * processes,
        nodes=config.distributed.num_nodes,
        memory=wanted.memory or "",
        partition=wanted.partition or profile.partition or "",
        account=wanted.account or profile.account or "",
        qos=wanted.qos or profile.qos or "",
        constraint=wanted.constraint or profile.constraint or "",
    )


def read_minutes(text: str) -> int | None:
    """A time limit in whole minutes, rounded up; None if sbatch would not read it.

    sbatch knows `minutes`, `minutes:seconds`, `hours:minutes:seconds`, `days-hours`,
    `days-hours:minutes` and `days-hours:minutes:seconds` (its manual, --time).
    """
    found = _TIME.fullmatch(text.strip())
    if not found:
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
        found.append(Problem("resources.time", wanted.time, why, "resources.time=2:00:00"))
    elif minutes * 60 <= config.slurm.grace_s:
        why = f"leaves no time before the last {config.slurm.grace_s} s, in which a run saves"
        fix = f"resources.time={config.slurm.grace_s // 60 + 5}"
        found.append(Problem("resources.time", wanted.time, why, fix))
    if wanted.memory and not _MEMORY.fullmatch(wanted.memory):
        why = "is no amount of memory: a number and K, M, G or T"
        found.append(Problem("resources.memory", wanted.memory, why, "resources.memory=64G"))
    found += [
        Problem(path, repr(text), "goes into a line of the batch script and must be one line")
        for path, text in _lines_of(config.slurm, config)
        if re.search(r"[\x00-\x08\x0a-\x1f]", text)
    ]
    return found + _wrong_options(config.slurm)


def _wrong_options(profile: Slurm) -> list[Problem]:
    found = []
    for name in profile.options:
        if not _OPTION.fullmatch(name):
            why = "is no long name of an option of sbatch: letters, digits and dashes"
            found.append(Problem("slurm.options", repr(name), why))
        elif name in _OWN:
            why = "is set by eke" + (f", from {_OWN[name]}" if _OWN[name] else " itself")
            found.append(Problem(f"slurm.options.{name}", profile.options[name], why, _OWN[name]))
    return found


def _lines_of(profile: Slurm, config: Config) -> list[tuple[str, str]]:
    """What ends up behind `#SBATCH` or in a command, by key path."""
    names = ("partition", "account", "qos", "constraint")
    texts = [(f"resources.{n}", getattr(config.resources, n) or "") for n in names]
    texts += [(f"slurm.{n}", getattr(profile, n) or "") for n in (*names, "gpu_type", "python")]
    texts += [("slurm.command_prefix", profile.command_prefix)]
    texts += [("slurm.srun", text) for text in profile.srun]
    texts += [("slurm.setup", text) for text in profile.setup]
    texts += [("paths.runs", str(user_path(config.paths.runs).absolute()))]
    return texts + [("slurm.options", f"{k}={v}") for k, v in profile.options.items()]
