"""The exception tree.

EkeError                    base of every error shown to the user; has an exit code
|-- ConfigError             the user's input is wrong: a list of problems, all at once (exit 2; 1
|                           where only the machine's state is the cause, e.g. a full disk)
|-- BusyError               another process is working on the same run (exit 16)
`-- RunError                a run could not be finished (exit 1)
    `-- ChangedError        its input or software has changed since planning (exit 2)
"""

import errno
import re
import resource
import shlex
import traceback
from dataclasses import dataclass

from eke.common.masking import mask
from eke.common.paths import program

_PLACEHOLDER = re.compile(r"COLUMN|FILE|FOLDER|SPLIT|[A-Z]+(_[A-Z]+)+")


def is_placeholder(override: str) -> bool:
    """Whether an override's value is a placeholder: `data.path=FILE_OR_FOLDER`."""
    return bool(_PLACEHOLDER.fullmatch(override.rpartition("=")[2]))


def _for_shell(word: str) -> str:
    """Quote a word for a shell, a quoted value in double quotes if that needs no escape."""
    return f'"{word}"' if "'" in word and not re.search(r'["$`\\!]', word) else shlex.quote(word)


@dataclass(frozen=True, init=False)
class Fix:
    """The fix of a problem: command-line words, a remark, or both."""

    words: tuple[str, ...]
    """Overrides in order, unquoted, possibly with placeholders; `-m` first for a sweep."""
    remark: str
    """Text that accompanies the words (e.g. an alternative) or replaces them."""

    def __init__(self, *words: str, remark: str = "") -> None:
        object.__setattr__(self, "words", words)
        object.__setattr__(self, "remark", remark)

    @property
    def overrides(self) -> tuple[str, ...]:
        """The words if they are executable as they are; empty otherwise."""
        return () if any(map(is_placeholder, self.words)) else self.words

    @property
    def is_sweep(self) -> bool:
        """Whether the overrides describe several runs."""
        return self.words[:1] == ("-m",)

    def __bool__(self) -> bool:
        return bool(self.words or self.remark)

    def __str__(self) -> str:
        command = f"{program()} " if self.is_sweep else ""
        shown = command + " ".join(map(_for_shell, self.words))
        return f"{shown}   ({self.remark})" if shown and self.remark else shown or self.remark


@dataclass(frozen=True)
class Problem:
    """One error in a configuration, and its fix."""

    key: str
    """Key path, as on the command line: `batch.per_device`."""
    value: str
    """The offending value, as the user would write it; empty when there is none to show."""
    why: str
    """The violated limit, with its number."""
    fix: Fix = Fix()
    """Empty only when no override fixes it."""
    id: str = ""
    """Identifier of the rule that found it; empty for spelling and type errors."""
    passing: bool = False
    """Caused by the machine's current state: the same command may work later."""

    @property
    def overrides(self) -> tuple[str, ...]:
        """Overrides that fix it, executable as they are; empty if there are none."""
        return self.fix.overrides

    @property
    def remark(self) -> str:
        """Text that accompanies the overrides; the whole fix if it has no override."""
        return self.fix.remark if self.overrides else str(self.fix)

    @property
    def is_argument(self) -> bool:
        """Whether it is about an argument of a command, DIR or --by, and not about an override."""
        return bool(re.match(r"[A-Z]|-|eke ", self.key))

    def render(self) -> str:
        """The problem as two indented lines, what and why, then the fix."""
        what = " ".join((f"{self.key} = {self.value}" if self.value else self.key).split("\n"))
        lines = [f"  {what}", f"      {self.why}"]
        if self.fix:
            lines.append(f"      -> {self.fix}")
        return "\n".join(lines)

    def as_json(self) -> dict[str, object]:
        """The problem as plain values, for programs."""
        return {
            "id": self.id or ("wrong_argument" if self.is_argument else "wrong_override"),
            "key": self.key,
            "value": self.value,
            "why": self.why,
            "overrides": list(self.overrides),
            "remark": self.remark,
        }


class EkeError(Exception):
    """Base of every error shown to the user, without a traceback and with secrets masked."""

    exit_code: int = 1

    def __str__(self) -> str:
        return mask(super().__str__())

    def short(self) -> str:
        """The error on one line, for tables of runs."""
        return str(self)


class ConfigError(EkeError):
    """The configuration cannot be run; holds every problem found, not only the first."""

    exit_code = 2

    def __init__(self, problems: "list[Problem] | Problem | str") -> None:
        if isinstance(problems, str):
            problems = Problem(key=problems, value="", why="")
        self.problems = [problems] if isinstance(problems, Problem) else list(problems)
        self.is_passing = bool(self.problems) and all(p.passing for p in self.problems)
        """Whether the machine's current state is the only cause."""
        if self.is_passing:
            self.exit_code = EkeError.exit_code
        super().__init__(self.render())

    @property
    def rule(self) -> str:
        """Identifier of the first rule among the problems; empty if there is none."""
        return next((problem.id for problem in self.problems if problem.id), "")

    def short(self) -> str:
        """All problems on one line."""
        lines = (
            f"{p.key} = {p.value} {p.why}" + (f" -> {p.fix}" if p.fix else "")
            for p in self.problems
        )
        return mask("; ".join(lines))

    def render(self) -> str:
        """All problems, under one heading that counts them."""
        count = len(self.problems)
        if count == 1 and not self.problems[0].why:
            return self.problems[0].key
        heading = "1 problem" if count == 1 else f"{count} problems"
        where = " on this machine at the moment" if self.is_passing else " in this configuration"
        where = "" if all(p.is_argument for p in self.problems) else where
        return "\n".join([f"{heading}{where}:", *(p.render() for p in self.problems)])


class BusyError(EkeError):
    """Another process holds the run folder."""

    exit_code = errno.EBUSY
    """16: neither an invalid command nor 75, on which a job script requeues."""


class RunError(EkeError):
    """The run could not be finished, for a reason the user can act on."""


class ChangedError(RunError):
    """A run's input or the software has changed since planning; the run is rejected."""

    exit_code = 2


def of_system(error: OSError) -> str:
    """Format an operating system error and its file, if it names one, on one line."""
    where = error.filename
    if not where and isinstance(error, FileNotFoundError):  # of os.getcwd()
        return "the current folder has been deleted: cd FOLDER"
    if not where and (frames := traceback.extract_tb(error.__traceback__)):
        where = f"{frames[-1].name}, {frames[-1].line}"  # the operation, if no file has a name
    line = " ".join(f"{where or 'a file'}: {error.strerror or error}".split("\n"))
    return f"{line}; {why}" if (why := no_room(error)) else line


def no_room(error: OSError) -> str:
    """Advice for a full disk or quota; empty for any other error."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    too_large = "its file system takes no larger files: paths.runs=FOLDER_ON_ANOTHER_DISK"
    if limit != resource.RLIM_INFINITY:
        too_large = f"no file may have more than {limit // 1024} KiB here: ulimit -f unlimited"
    return {
        errno.ENOSPC: "the disk is full: free some and run again",
        errno.EDQUOT: "your quota on its disk is used up: free some and run again",
        errno.EFBIG: too_large,
    }.get(error.errno or 0, "")
