"""Exceptions.

EkeError                    base of all errors shown to the user, with an exit code
|-- ConfigError             invalid input: a list of all problems (exit 2, or 1 if only the state
|                           of the machine is the cause, e.g. a full disk)
|-- BusyError               another process works on the same run (exit 16)
`-- RunError                a run could not be finished (exit 1)
    `-- ChangedError        input or software changed since planning (exit 2)
"""

import errno
import re
import resource
import shlex
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from eke.common.masking import mask
from eke.common.paths import program
from eke.common.screen import paint, width, wrap

_PLACEHOLDER = re.compile(r"COLUMN|FILE|FOLDER|SPLIT|[A-Z]+(_[A-Z]+)+")


_COMMAND = re.compile(r"(eke|python\S*|pip|uv|export|ulimit|mv|cp|rm|cd|git|chmod|\w+=\S*|--?\w)\b")
"""Start of a remark that is a command, an override or a flag, which is kept on one line."""


def is_placeholder(override: str) -> bool:
    """Return whether an override's value is a placeholder: `data.path=FILE_OR_FOLDER`."""
    return bool(_PLACEHOLDER.fullmatch(override.rpartition("=")[2]))


def _for_shell(word: str) -> str:
    """Quote a word for a shell, preferring double quotes around single quotes."""
    return f'"{word}"' if "'" in word and not re.search(r'["$`\\!]', word) else shlex.quote(word)


@dataclass(frozen=True, init=False)
class Fix:
    """Fix of a problem: command-line words, a remark, or both."""

    words: tuple[str, ...]
    """Overrides in order, unquoted, possibly with placeholders. `-m` comes first for a sweep."""
    remark: str
    """Text after the words (e.g. an alternative), or instead of them."""

    def __init__(self, *words: str, remark: str = "") -> None:
        object.__setattr__(self, "words", words)
        object.__setattr__(self, "remark", remark)

    @property
    def overrides(self) -> tuple[str, ...]:
        """The words if they contain no placeholder, else empty."""
        return () if any(map(is_placeholder, self.words)) else self.words

    @property
    def is_sweep(self) -> bool:
        """True if the overrides describe a sweep."""
        return self.words[:1] == ("-m",)

    def __bool__(self) -> bool:
        return bool(self.words or self.remark)

    def __str__(self) -> str:
        command = f"{program()} " if self.is_sweep else ""
        shown = command + " ".join(map(_for_shell, self.words))
        return f"{shown}   ({self.remark})" if shown and self.remark else shown or self.remark


def fix_lines(fix: str, columns: int, stream: TextIO) -> list[str]:
    """Return overrides, or a command, which is not wrapped, and the remark after them."""
    typed, gap, remark = fix.partition("   (")
    is_wrapped = all("=" in word for word in typed.split())
    shown = wrap(f"-> {typed}", columns, "    ", " " * 7) if is_wrapped else [f"    -> {typed}"]
    lines = [line.replace(line.lstrip(), paint(line.lstrip(), "green", stream)) for line in shown]
    if gap and len(shown[-1]) + len(gap) + len(remark) <= columns:
        lines[-1] += f"{gap}{remark}"
    elif gap:
        lines += wrap(f"({remark}", columns, " " * 7)
    return lines


@dataclass(frozen=True)
class Problem:
    """Problem of a configuration or command, and its fix."""

    key: str
    """Key as on the command line: `batch.per_device`."""
    value: str
    """The invalid value, as on the command line. Empty if there is none."""
    why: str
    """The violated limit, with its number."""
    fix: Fix = Fix()
    """Fix, empty if no override or command fixes it."""
    id: str = ""
    """Identifier of the rule, or of the kind of mistake: `unknown_key`, `wrong_type`. Required."""
    passing: bool = False
    """True if the machine's current state is the cause: the command may work later."""

    @property
    def overrides(self) -> tuple[str, ...]:
        """Overrides that fix it, without placeholders. May be empty."""
        return self.fix.overrides

    @property
    def remark(self) -> str:
        """Text after the overrides, or the entire fix without overrides."""
        return self.fix.remark if self.overrides else str(self.fix)

    @property
    def is_argument(self) -> bool:
        """True if it is about an argument of a command (DIR, --by), not about an override."""
        return bool(re.match(r"[A-Z]|-|eke\b", self.key))

    def render(self) -> str:
        """Format the problem as two indented lines and the fix."""
        what = " ".join((f"{self.key} = {self.value}" if self.value else self.key).split("\n"))
        lines = [f"  {what}", f"      {self.why}"]
        if self.fix:
            lines.append(f"      -> {self.fix}")
        return "\n".join(lines)

    def screen(self, columns: int, stream: TextIO) -> list[str]:
        """Return the problem as lines for a terminal or pipe: key, reason and fix."""
        what = " ".join((f"{self.key} = {self.value}" if self.value else self.key).split("\n"))
        lines = [f"  {paint(mask(what), 'red', stream)}"]
        lines += wrap(mask(self.why), columns, " " * 4) if self.why else []
        fix = mask(str(self.fix))
        if fix and not self.fix.words and not _COMMAND.match(fix):
            return [*lines, *wrap(fix, columns, f"    {paint('->', 'green', stream)} ")]
        return lines + (fix_lines(fix, columns, stream) if fix else [])

    def as_json(self) -> dict[str, object]:
        """Return the problem as plain values."""
        return {
            "id": self.id,
            "key": self.key,
            "value": self.value,
            "why": self.why,
            "overrides": list(self.overrides),
            "remark": self.remark,
        }


class EkeError(Exception):
    """Base of every error shown to the user, without a traceback and with secrets masked."""

    exit_code: int = 1
    id: str = "failed"
    """Identifier of the kind of error, for `--json`. Problems have their own."""

    def __str__(self) -> str:
        return mask(super().__str__())

    def short(self) -> str:
        """Return the error on one line, for tables of runs."""
        return str(self)

    def screen(self, stream: TextIO, typed: Sequence[str] = ()) -> str:
        """Return the error as wrapped text with the colours of a stream.

        `typed`: words of the command, with its program. It is shown again with all fixes.
        """
        heading = f"{paint('error:', 'bold red', stream)} "
        first, *more = str(self).split("\n")
        return "\n".join([*wrap(first, width(stream), heading, "  "), *more])


class ConfigError(EkeError):
    """Error of an invalid configuration, with all its problems."""

    exit_code = 2

    def __init__(self, problems: list[Problem] | Problem) -> None:
        self.problems = [problems] if isinstance(problems, Problem) else list(problems)
        self.is_passing = bool(self.problems) and all(p.passing for p in self.problems)
        """True if the machine's current state is the only cause."""
        if self.is_passing:
            self.exit_code = EkeError.exit_code
        super().__init__(self.render())

    @property
    def rule(self) -> str:
        """Identifier of the first problem, "" without one."""
        return self.problems[0].id if self.problems else ""

    def short(self) -> str:
        """Return all problems on one line."""
        lines = (
            f"{p.key} = {p.value} {p.why}" + (f" -> {p.fix}" if p.fix else "")
            for p in self.problems
        )
        return mask("; ".join(lines))

    def render(self) -> str:
        """Format all problems under a heading with their number, as plain text."""
        if self._is_sentence:
            return self.problems[0].key
        return "\n".join([f"{self._heading()}:", *(p.render() for p in self.problems)])

    @property
    def _is_sentence(self) -> bool:
        return len(self.problems) == 1 and not self.problems[0].why

    def _heading(self) -> str:
        count, keys = len(self.problems), {problem.key for problem in self.problems}
        where = "in this configuration"
        place = re.fullmatch(r"(.+\.\w+):(\d+)", next(iter(keys), ""))
        if self.is_passing:
            where = "on this machine at the moment"
        elif len(keys) == 1 and place:
            where = f"in {place[1]}, line {place[2]}"
        elif len(keys) == 1 and re.fullmatch(r"[A-Z]+", next(iter(keys))):
            where = f"with {next(iter(keys))}"
        elif all(problem.is_argument for problem in self.problems):
            where = "in this command"
        return f"{count} problem{'s' if count != 1 else ''} {where}"

    def screen(self, stream: TextIO, typed: Sequence[str] = ()) -> str:
        """Return all problems under a heading, and the command with all fixes."""
        if self._is_sentence and not self.problems[0].fix:
            return super().screen(stream)
        columns = width(stream)
        lines = wrap(self._heading(), columns, f"{paint('error:', 'bold red', stream)} ")
        for problem in self.problems:
            lines += problem.screen(columns, stream)
        if words := self._fixed(typed):
            lines += ["", paint("with all fixes:", "bold", stream)]
            lines += _command_lines(words, columns)
        return "\n".join(lines)

    def _fixed(self, typed: Sequence[str]) -> list[str]:
        """Return the command with the fixes in place of the wrong words, [] without all fixes."""
        unclear = [
            p for p in self.problems
            if p.fix.is_sweep or p.is_argument or not p.overrides or p.id == "spaces"
            or p.key.endswith("...")
        ]  # fmt: skip
        if len(self.problems) < 2 or unclear or not typed:
            return []
        fixes = {word.partition("=")[0]: word for p in self.problems for word in p.overrides}
        wrong = {problem.key.lstrip("+~") for problem in self.problems} | set(fixes)
        kept = [word for word in typed if word.lstrip("+~").partition("=")[0] not in wrong]
        return [mask(_for_shell(word)) for word in [*kept, *fixes.values()]]


def _command_lines(words: Sequence[str], columns: int) -> list[str]:
    """Wrap a command between its words, with backslashes for a shell."""
    whole = " ".join(word.replace(" ", "\0") for word in words)  # `wrap` keeps these spaces
    lines = wrap(whole, columns - len(" \\"), "  ", "    ")
    return [*(f"{line} \\" for line in lines[:-1]), lines[-1]]


class BusyError(EkeError):
    """Error of a run folder that another process uses."""

    id = "busy"
    exit_code = errno.EBUSY
    """16 is neither of invalid commands nor 75, on which a job script requeues."""


class RunError(EkeError):
    """Error of a run that could not be finished, with a reason for the user."""

    id = "failed_run"


class ChangedError(RunError):
    """Error of a run whose input or software changed since planning."""

    id = "changed_input"
    exit_code = 2


def format_os_error(error: OSError) -> str:
    """Format an error of the operating system and its file, if known, on one line."""
    where = error.filename
    if not where and isinstance(error, FileNotFoundError):  # from os.getcwd()
        return "the current folder has been deleted: cd FOLDER"
    if not where and (frames := traceback.extract_tb(error.__traceback__)):
        where = f"{frames[-1].name}, {frames[-1].line}"  # the operation, if no file has a name
    line = " ".join(f"{where or 'a file'}: {error.strerror or error}".split("\n"))
    return f"{line}. {why}" if (why := disk_full_hint(error)) else line


def disk_full_hint(error: OSError) -> str:
    """Return advice for a full disk or quota, "" for other errors."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    too_large = "The file system has a size limit: paths.runs=FOLDER_ON_ANOTHER_DISK"
    if limit != resource.RLIM_INFINITY:
        too_large = f"Files are limited to {limit // 1024} KiB: ulimit -f unlimited"
    return {
        errno.ENOSPC: "The disk is full: free some space and run again",
        errno.EDQUOT: "The disk quota is used up: free some space and run again",
        errno.EFBIG: too_large,
    }.get(error.errno or 0, "")
