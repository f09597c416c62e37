"""The exception tree.

EkeError                    anything eke says to a user; carries its exit code
|-- ConfigError             the user's input is wrong: a list of problems, all at once (exit 2; 1
|                           where only the machine stands in the way, as a full disk does)
|-- BusyError               another process is working on the same run (exit 2)
`-- RunError                a run could not be finished (exit 1)
    `-- ChangedError        its input or software is not what was planned (exit 2)
"""

import errno
import resource
from dataclasses import dataclass

from eke.common.masking import mask


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a configuration, and the override that mends it."""

    path: str
    """Key path, as it is typed on the command line: `batch.per_device`."""
    value: str
    """The offending value, as the user would type it; empty when there is none to show."""
    why: str
    """The limit that was broken, with its number."""
    fix: str = ""
    """The literal override to type; empty only when no single override can mend it."""
    rule: str = ""
    """Identifier of the rule that found it; empty for spelling and type errors."""
    passing: bool = False
    """Of the machine as it is now, not of what was typed: the same command may work later."""

    def render(self) -> str:
        """The problem as two indented lines: what and why, then the fix."""
        what = " ".join((f"{self.path} = {self.value}" if self.value else self.path).split("\n"))
        lines = [f"  {what}", f"      {self.why}"]
        if self.fix:
            lines.append(f"      -> {self.fix}")
        return "\n".join(lines)


class EkeError(Exception):
    """Base of every error that is meant for the user: shown without a traceback or a secret."""

    exit_code: int = 1

    def __str__(self) -> str:
        return mask(super().__str__())

    def short(self) -> str:
        """It on one line: for a table of many runs."""
        return str(self)


class ConfigError(EkeError):
    """The configuration cannot be run; holds every problem found, not only the first."""

    exit_code = 2

    def __init__(self, problems: "list[Problem] | Problem | str") -> None:
        if isinstance(problems, str):
            problems = Problem(path=problems, value="", why="")
        self.problems = [problems] if isinstance(problems, Problem) else list(problems)
        self.is_passing = bool(self.problems) and all(p.passing for p in self.problems)
        """Whether nothing is wrong with what was typed."""
        if self.is_passing:
            self.exit_code = EkeError.exit_code
        super().__init__(self.render())

    @property
    def rule(self) -> str:
        """The first rule that says so; empty where none does, or one without an identifier."""
        return next((problem.rule for problem in self.problems if problem.rule), "")

    def short(self) -> str:
        """All problems on one line."""
        told = (
            f"{p.path} = {p.value} {p.why}" + (f" -> {p.fix}" if p.fix else "")
            for p in self.problems
        )
        return mask("; ".join(told))

    def render(self) -> str:
        """All problems, under one heading that counts them."""
        count = len(self.problems)
        if count == 1 and not self.problems[0].why:
            return self.problems[0].path
        heading = "1 problem" if count == 1 else f"{count} problems"
        where = "on this machine at the moment" if self.is_passing else "in this configuration"
        return "\n".join([f"{heading} {where}:", *(p.render() for p in self.problems)])


class BusyError(EkeError):
    """Another process holds the run folder."""

    exit_code = 2


class RunError(EkeError):
    """The run could not be finished, for a reason the user can act on."""

    exit_code = 1


class ChangedError(RunError):
    """What a run reads, or the software, is not what was planned: it is refused, not trained."""

    exit_code = 2


def of_system(error: OSError, file: object = "a file") -> str:
    """What the operating system could not do, and with which file, in words.

    Args:
        error: the system's.
        file: which one it was, where the error does not say.
    """
    told = " ".join(f"{error.filename or file}: {error.strerror or error}".split("\n"))
    return f"{told}; {why}" if (why := no_room(error)) else told


def no_room(error: OSError) -> str:
    """What helps where a file could not grow; empty for any other error."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    too_large = "its file system takes no larger files: paths.runs=FOLDER_ON_ANOTHER_DISK"
    if limit != resource.RLIM_INFINITY:
        too_large = f"no file may have more than {limit // 1024} KiB here: ulimit -f unlimited"
    return {
        errno.ENOSPC: "the disk is full: free some and run again",
        errno.EDQUOT: "your quota on its disk is used up: free some and run again",
        errno.EFBIG: too_large,
    }.get(error.errno or 0, "")
