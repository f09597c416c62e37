"""Live view of a run (a bar on a terminal, else lines), and the processes that run a sweep."""

import contextlib
import math
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TextIO, cast

from eke.common.files import (
    READ_LIMIT,
    is_locked,
    last_bytes,
    make_private_dir,
    open_file,
    open_to_read,
    try_lock,
)
from eke.common.output import printable, raw_stream, write_line
from eke.common.paths import RunPaths, SweepPaths
from eke.common.screen import is_quiet, paint, plain, width, wrap_log
from eke.common.table import text_width
from eke.common.text import format_count, format_seconds
from eke.plan.record import IN_LOG, metrics

REFRESH_S = 0.5
"""Refresh interval of tables, in seconds."""

LOG_INTERVAL_S = 60.0
"""Interval between progress lines without a terminal, in seconds."""


class Tail:
    """New complete lines of a file that another process appends to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = path.stat().st_size if path.exists() else 0

    def lines(self, last: bool = False) -> list[str]:
        """Return the lines since the last call, with `last` also an incomplete line."""
        try:
            with open(open_to_read(self.path), "rb") as file:
                file.seek(self.position)
                content = file.read(READ_LIMIT)
        except OSError:
            return []
        if not last and len(content) < READ_LIMIT:
            content = content[: content.rfind(b"\n") + 1]
        self.position += len(content)
        return content.decode(errors="replace").splitlines()


class NewestStep(NamedTuple):
    """Progress of a run by its newest training step."""

    step: int = 0
    loss: float | None = None
    """None if it is not a number."""
    step_s: float | None = None

    def left_s(self, total: int) -> float | None:
        """Return the seconds to the last step, at the newest step's speed."""
        return None if self.step_s is None else self.step_s * max(0, total - self.step)

    def text(self, total: int) -> str:
        """Return step, loss, step time and time left, without unknown values."""
        parts = [f"step {self.step}/{total}"]
        parts += [f"loss {self.loss:.4f}"] if self.loss is not None else []
        if self.step_s is not None and (left := self.left_s(total)) is not None:
            parts += [f"{format_seconds(self.step_s)}/step", f"{format_seconds(left)} left"]
        return ", ".join(parts)


def newest_step(paths: RunPaths) -> NewestStep:
    """Return the newest step in a run's metrics, step 0 without one."""
    try:
        content = last_bytes(paths.metrics, 4096)  # longer than a row
    except OSError:
        return NewestStep()
    for line in reversed(content.decode(errors="replace").splitlines()):
        row = metrics.parse_row(line)
        if row and metrics.LOSS in row and metrics.STEP in row:
            loss, seconds = (as_number(row.get(key)) for key in (metrics.LOSS, metrics.STEP_TIME))
            return NewestStep(int(row[metrics.STEP]), loss, seconds)
    return NewestStep()


def as_number(value: Any) -> float | None:
    """Return a number, None for missing values and for words such as "nan"."""
    return value if isinstance(value, int | float) else None


class LiveText:
    """Lines at the end of a terminal's output, redrawn below the lines printed meanwhile."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.started, self._drawn = raw_stream(stream), time.monotonic(), [""]

    @property
    def height(self) -> int:
        """Rows of the terminal."""
        return os.get_terminal_size(self.stream.fileno()).lines or 24

    def draw(self, text: str) -> None:
        """Show a text in place of the last one, without the lines beyond the terminal's height."""
        lines = printable(text).split("\n")
        while len(lines) > 1 and self._go_up(lines) >= self.height - 1:
            lines.pop()
        if lines != self._drawn:
            up = f"\x1b[{n}A" if (n := self._go_up(self._drawn)) else ""  # ECMA-48, CUU
            # ED erases all below. The terminal breaks long lines, so that a copied one is whole.
            self.stream.write(f"\r{up}\x1b[J" + "\n".join(lines))
            self.stream.flush()
            self._drawn = lines

    def _go_up(self, lines: Sequence[str]) -> int:
        """Return the rows from the last to the first of these lines."""
        columns = width(self.stream)
        return sum(max(1, -(-text_width(plain(line)) // columns)) for line in lines) - 1


class _Above:
    """Stream whose texts appear above a live text, which the next `draw` shows again."""

    def __init__(self, stream: TextIO, live: LiveText) -> None:
        self._stream, self._live = stream, live

    def write(self, text: str) -> int:
        self._live.draw("")
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def open_live(stream: TextIO) -> Iterator[LiveText | None]:
    """Open a live text on a terminal, without -q. It is erased at the end."""
    if not stream.isatty() or os.environ.get("TERM") == "dumb" or is_quiet():
        yield None
        return
    live = LiveText(stream)
    out, err = (cast(TextIO, _Above(each, live)) for each in (sys.stdout, sys.stderr))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            yield live
        finally:
            live.draw("")


class RunView:
    """New lines of a run's log, steps and evaluations. On a terminal, a bar below them."""

    def __init__(
        self, paths: RunPaths, total: int = 0, log_every: int = 1, bar: LiveText | None = None
    ) -> None:
        self.paths, self.total, self.log_every, self.bar = paths, total, log_every, bar
        self.log, self.rows = Tail(paths.log), Tail(paths.metrics)
        self._shown, self._steps = _Progress(), list[metrics.Row]()

    def update(self, last: bool = False) -> None:
        """Print new lines, and redraw the bar."""
        log, rows = self.log.lines(last), self.rows.lines(last)
        if is_quiet():
            return
        for line in log:
            if not line.startswith(IN_LOG):
                self._print(line, is_log=True)
        for row in filter(None, map(metrics.parse_row, rows)):
            self._take(row)
        if self.bar and last:
            self.bar.draw("")
        elif self.bar:
            elapsed = time.monotonic() - self.bar.started
            self.bar.draw(_bar_text(self._shown, self.total, elapsed))

    def _take(self, row: metrics.Row) -> None:
        step = int(row.get(metrics.STEP, 0))
        if metrics.EVAL_LOSS in row:
            self._print(f"eval  step {step}  {_evaluation_text(row)}")
        if metrics.LOSS not in row:
            return
        self._steps.append(row)
        if step % self.log_every and step != self.total:
            return
        self._shown = _progress_of(self._steps)
        self._steps.clear()
        if self.bar is None:
            self._print("  ".join([f"step {step}/{self.total}", *self._shown.texts()]))

    def _print(self, text: str, is_log: bool = False) -> None:
        is_whole = is_log and self.bar is None  # a line of a log is not wrapped in another log
        lines = [text] if is_whole else wrap_log([text], width(sys.stderr))
        write_line("\n".join(lines), sys.stderr)


class _Progress(NamedTuple):
    """Newest step and means over the steps since the step shown before."""

    step: int = 0
    loss: float = math.nan
    step_s: float | None = None
    """None if all of these steps are warm-up."""
    rate: str = ""
    """Tokens per second, or samples without tokens."""

    def texts(self) -> list[str]:
        """Return loss, time per step and rate."""
        if self.step_s is None:
            return [f"loss {self.loss:.4f}", "warm-up"]
        return [f"loss {self.loss:.4f}", f"{format_seconds(self.step_s)}/step", self.rate]


def _progress_of(rows: Sequence[metrics.Row]) -> _Progress:
    newest, steady = rows[-1], [row for row in rows if metrics.WARMUP not in row]
    at = int(newest[metrics.STEP]), newest[metrics.LOSS]
    seconds = sum(row[metrics.STEP_TIME] for row in steady)
    if not seconds:
        return _Progress(*at)
    tokens, samples = (sum(row[key] for row in steady) for key in (metrics.TOKENS, metrics.SAMPLES))
    unit = "tokens" if tokens else "samples"
    rate = f"{format_count((tokens or samples) / seconds)} {unit}/s"
    return _Progress(*at, seconds / len(steady), rate)


def _evaluation_text(row: metrics.Row) -> str:
    hidden = (metrics.EVAL_LOSS, metrics.BITS_PER_BYTE)
    names = [key for key in row if key.startswith("eval/") and key not in hidden]
    texts = [metrics.format_metric(key.removeprefix("eval/"), row[key]) for key in names]
    return "  ".join([f"loss {row[metrics.EVAL_LOSS]:.4f}", *texts])


_MIN_BAR, _MAX_BAR = 4, 40
"""Columns of the bar: choices."""


def _bar_text(shown: _Progress, total: int, elapsed_s: float) -> str:
    """Return bar, step, loss, rate and times, without those that do not fit."""
    step, past = f"{shown.step}/{total}", _clock(elapsed_s)
    if shown.step_s is not None:
        loss, _, rate = shown.texts()
        left = f"{_clock(shown.step_s * max(0, total - shown.step))} left"
        parts = [f"{step}  {loss}  {rate}  {past}, {left}", f"{step}  {loss}  {rate}  {left}"]
        parts += [f"{step}  {loss}  {left}", f"{step}  {loss}"]
    elif shown.step:
        parts = [f"{step}  {shown.texts()[0]}  {past}", step]
    else:
        parts = [f"{step}  {past}", step]
    # The last column stays free: some terminals begin a new line after it.
    rooms = [width(sys.stderr) - 1 - len(f"train   {text}") for text in parts]
    fitting = (pair for pair in zip(rooms, parts, strict=True) if pair[0] >= _MIN_BAR)
    room, text = next(fitting, (0, parts[-1]))
    room = min(room, _MAX_BAR)
    done = room * min(shown.step, total) // max(1, total)
    bar = f"{paint(_DONE * done, 'green', sys.stderr)}{_OPEN * (room - done)}"
    return f"train {bar}  {text}" if room else text


_DONE, _OPEN = "\N{BOX DRAWINGS HEAVY HORIZONTAL}", "\N{BOX DRAWINGS LIGHT HORIZONTAL}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


@contextmanager
def open_view(paths: RunPaths, total_steps: int, log_every: int) -> Iterator[RunView]:
    """Open a progress bar on a terminal, else plain lines."""
    with open_live(sys.stderr) as bar:
        yield RunView(paths, total_steps, log_every, bar)


class Watcher(NamedTuple):
    """A process that starts the remaining runs of a sweep, and its lock."""

    host: str
    process: str
    lock: Path


@contextmanager
def watching(paths: SweepPaths) -> Iterator[None]:
    """Register this process as a watcher of a sweep."""
    lock = paths.watcher(socket.gethostname(), os.getpid())
    made = lock.with_name(f".new{lock.name}")
    with contextlib.ExitStack() as held:
        held.callback(_forget_killed, paths)  # also watchers killed together with this one
        with contextlib.suppress(OSError):  # a sweep also runs without a folder or locks for this
            make_private_dir(lock.parent)
            descriptor = open_file(made, os.O_RDWR | os.O_CREAT)
            held.callback(os.close, descriptor)
            held.callback(_forget, lock)
            held.callback(_forget, made)
            try_lock(descriptor)
            os.replace(made, lock)  # never visible while unlocked
        _forget_killed(paths)
        yield


def _forget_killed(paths: SweepPaths) -> None:
    for left in paths.watchers():
        if not is_locked(left):
            _forget(left)


def _forget(lock: Path) -> None:
    with contextlib.suppress(OSError):
        lock.unlink(missing_ok=True)


def watchers_of(paths: SweepPaths) -> list[Watcher]:
    """Return the current watchers of a sweep. Several may share its runs."""
    return [Watcher(*paths.who_watches(lock), lock) for lock in paths.watchers() if is_locked(lock)]


def watchers_in(folder: Path) -> list[Watcher]:
    """Return the watchers of the sweep in a folder, or of all sweeps in its subfolders."""
    folders = [folder] if SweepPaths(folder).sweep.exists() else sorted(folder.glob("sweep-*"))
    return [watcher for each in folders for watcher in watchers_of(SweepPaths(each))]
