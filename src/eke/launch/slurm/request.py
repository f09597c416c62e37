"""What runs ask SLURM for; runs that ask for the same go into one array."""

import re
from dataclasses import dataclass

from eke.errors import ConfigError, Problem
from eke.plan import Plan
from eke.schema import Config, Slurm

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<clock>\d+(?::\d+){0,2})")
_MEMORY = re.compile(r"\d+[KMGT]?B?", re.IGNORECASE)


@dataclass(frozen=True)
class Request:
    """One job of an array, as SLURM is to see it."""

    minutes: int
    """Time limit."""
    gpus: int
    """On the node."""
    cpus: int
    """On the node."""
    memory: str = ""
    """Of the node, in sbatch's form; empty for the cluster's default, as are the others."""
    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""

    @property
    def gpu_hours(self) -> float:
        """At most, for one run."""
        return self.gpus * self.minutes / 60


def make_request(plan: Plan) -> Request:
    """What this run asks for.

    Raises:
        ConfigError: a value that sbatch would not read.
    """
    config, processes = plan.config, plan.batch.world_size * plan.batch.devices
    wanted, profile = config.resources, config.slurm
    problems = _problems(config)
    if problems:
        raise ConfigError(problems)
    each = wanted.gpus if wanted.gpus is not None else int(plan.device.kind == "cuda")
    return Request(
        minutes=read_minutes(wanted.time) or 0,
        gpus=each * processes,
        cpus=wanted.cpus * processes,
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
    return found + [
        Problem(path, repr(text), "goes into a line of the batch script and must be one line")
        for path, text in _lines_of(config.slurm, config)
        if re.search(r"[\x00-\x1f]", text)
    ]


def _lines_of(profile: Slurm, config: Config) -> list[tuple[str, str]]:
    """What ends up behind `#SBATCH` or in a command, by key path."""
    names = ("partition", "account", "qos", "constraint")
    texts = [(f"resources.{n}", getattr(config.resources, n) or "") for n in names]
    texts += [(f"slurm.{n}", getattr(profile, n) or "") for n in (*names, "gpu_type", "python")]
    texts += [("slurm.command_prefix", profile.command_prefix)]
    texts += [("slurm.srun", text) for text in profile.srun]
    texts += [("slurm.setup", text) for text in profile.setup]
    return texts + [("slurm.options", f"{k}={v}") for k, v in profile.options.items()]
