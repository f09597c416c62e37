"""Status of a run, and the table of the runs of a sweep: while it runs and of its folders."""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TextIO

from eke.common.paths import RunPaths
from eke.common.screen import is_verbose, paint, plain, table_width, width, wrap
from eke.common.table import Column, render_table
from eke.common.text import format_seconds
from eke.launch.processes.follow import NewestStep, as_number
from eke.plan.record import Outcome, Record
from eke.results.report.summary import factor_columns

RUNNING, QUEUED, NOT_STARTED, INTERRUPTED = "running", "queued", "not started", "interrupted"
"""States of a run without an outcome. Outcomes that are not final are further states."""

WAITING = "waiting"
"""State of a run that its sweep's process will start."""

_ACTIVE = (RUNNING, QUEUED, WAITING)
"""States of runs that are running or will start without user action."""

_STYLES = {
    RUNNING: "cyan", Outcome.ok.name: "green", QUEUED: "", WAITING: "", NOT_STARTED: "dim",
    Outcome.refused.name: "yellow", Outcome.skipped.name: "yellow",
}  # fmt: skip
"""State -> style. States without a style are failures."""

NO_FOLDER = "refused"
"""Placeholder for the folder name of a job without a folder."""

ID_DIGITS = 8
"""Shown digits of a run id if no other folder begins with them."""

_FOLDED = 10
"""Number of runs in each state, except running ones, from which the others are only counted."""

_BAR = 20
"""Width of the bar, in characters."""


@dataclass(frozen=True)
class RunStatus:
    """Current state of one run. `launcher`, `job` and `silent` as in `JobStatus`."""

    paths: RunPaths
    label: str
    state: str
    """Name of an outcome, or one of the states above."""
    step: int = 0
    total: int = 0
    """Completed and planned steps. 0 before planning."""
    loss: float | None = None
    """Loss of the newest training step, or the record's if the run has ended."""
    where: str = ""
    """Job, device or process of the run, or its reason for waiting, for display."""
    note: str = ""
    """Why it failed, or its reason for waiting."""
    launcher: str = ""
    job: str = ""
    """Empty unless the run waits or runs."""
    silent: str = ""
    step_s: float | None = None
    """Seconds of the newest step of a running run, else the median of the steps."""
    lasted_s: float | None = None
    """Seconds from start to end, None if unknown."""
    overrides: tuple[str, ...] = ()
    row: str = ""
    """Name of its row in the sweep's definition. Empty without rows."""

    @property
    def left_s(self) -> float | None:
        """Seconds to the last step of a running run, None if unknown."""
        newest = NewestStep(self.step, self.loss, self.step_s)
        return newest.left_s(self.total) if self.state == RUNNING else None

    @property
    def is_active(self) -> bool:
        """True if the run is running or will start without user action."""
        return self.state in _ACTIVE

    @property
    def name(self) -> str:
        """Name of the run's folder, "" for a configuration without run."""
        has_none = self.state == Outcome.refused.name or self.paths.folder.name == NO_FOLDER
        return "" if has_none else self.paths.folder.name


def progress_of(record: Record) -> dict[str, Any]:
    """Return `step`, `loss`, `step_s` and `lasted_s` of an ended run."""
    steady = record.timing.steady_step_s
    return {
        "step": record.steps_done,
        "loss": as_number(record.loss.train_final),
        "step_s": steady.median if steady and not record.shared_device else None,
        "lasted_s": record.timing.whole_s,
    }


def describe_states(standings: Sequence[RunStatus], stream: TextIO | None = None) -> str:
    """Return the number of runs in each state, failures first: `1 oom, 4 ok, 1 running`."""
    numbers = Counter(each.state for each in standings)
    order = [Outcome.ok.name, *_STYLES]
    ranks = {state: order.index(state) if state in order else -1 for state in numbers}
    return ", ".join(
        paint(f"{numbers[state]} {state}", _STYLES.get(state, "red"), stream)
        for state in sorted(numbers, key=lambda state: ranks[state])
    )


def progress_lines(
    standings: Sequence[RunStatus], elapsed_s: float | None = None, stream: TextIO | None = None
) -> list[str]:
    """Return a bar of finished runs, the number in each state, and the elapsed and left time."""
    over = sum(not each.is_active and each.state != NOT_STARTED for each in standings)
    parts = sum(each.step / each.total for each in standings if each.is_active and each.total)
    size = min(_BAR, width(stream) // 4)
    full = int(size * min(1, (over + parts) / max(1, len(standings))))
    bar = paint("━" * full, "green", stream) + paint("─" * (size - full), "dim", stream)
    times = [format_seconds(elapsed_s)] if elapsed_s is not None else []
    times += [f"{format_seconds(left)} left"] if (left := _left_s(standings)) else []
    states, time = describe_states(standings, stream), ", ".join(times)
    line = f"{bar}  {states}   {time}".rstrip()
    fits = len(plain(line)) <= width(stream)
    return [line] if fits else [f"{bar}  {time}", *wrap(states, width(stream))]


def _left_s(standings: Sequence[RunStatus]) -> float | None:
    """Return the seconds until all runs end, by the times of ended runs and of steps, or None."""
    running = [each for each in standings if each.state == RUNNING]
    whole = [s.lasted_s for s in standings if s.lasted_s and not s.is_active]
    whole = whole or [s.step_s * s.total for s in running if s.step_s]
    if not running or not whole:
        return None
    mean = fmean(whole)
    ahead = [
        mean * (1 - s.step / max(1, s.total)) if s.left_s is None else s.left_s for s in running
    ]
    waiting = sum(each.state in (WAITING, QUEUED) for each in standings)
    return max(*ahead, (sum(ahead) + mean * waiting) / len(running), 0.0)


def render_runs(
    standings: Sequence[RunStatus], live: int = 0, fold: bool = True, stream: TextIO | None = None
) -> list[str]:
    """Return a table of the runs, running and failed ones first, and the number of hidden rows.

    `live`: lines of the view that is redrawn. 0: the table of the folders, with their ids. There
    `fold` hides all but the first ten runs in the same state. `stream` has the width and colours.
    """
    stream = stream or sys.stdout
    ordered, shown, seen = sorted(standings, key=_importance), list[RunStatus](), Counter[str]()
    for each in ordered:
        seen[each.state] += 1
        is_short = not fold or each.state == RUNNING or seen[each.state] <= _FOLDED
        shown += [each] if (len(shown) < live if live else is_short) else []
    places = {id(each): place for place, each in enumerate(standings)}
    factors = factor_columns([s.overrides for s in standings], [s.row for s in standings])
    columns = [
        Column(c.title, [c.cells[places[id(each)]] for each in shown], rank=c.rank) for c in factors
    ]
    if not live:
        columns.insert(0, Column("run", _short_names(shown)))
    columns += _state_columns(shown, bool(live), {each.state for each in standings})
    lines = render_table(columns, table_width(stream))
    styles = ["bold", *(_STYLES.get(each.state, "red") for each in shown)]
    painted = [
        paint(line, style, stream) if style else line
        for line, style in zip(lines, styles, strict=bool(lines))
    ]
    while live and len(painted) > 2 and "\n".join(painted).count("\n") > live:
        painted.pop()
    kept = {id(each) for each, _ in zip(shown, painted[1:], strict=False)}
    hidden = [each for each in ordered if id(each) not in kept]
    return painted + ([f"  ... and {describe_states(hidden, stream)}"] if hidden else [])


def _state_columns(shown: Sequence[RunStatus], live: bool, states: set[str]) -> list[Column]:
    steps = [f"{each.step}/{each.total}" if each.total else "" for each in shown]
    if live:
        words = [s if each.state == RUNNING else each.state
                 for s, each in zip(steps, shown, strict=True)]  # fmt: skip
        columns = [Column("step", words)]
    else:
        several = [each.state if len(states) > 1 else "" for each in shown]
        columns = [Column("state", several), Column("step", steps)]
    is_slow = max((each.step_s or 0 for each in shown), default=0) >= 10
    times = [each.step_s and each.step_s * (1 if is_slow else 1000) for each in shown]
    speeds = ["" if t is None else f"{t:.{0 if t >= 100 else 1}f}" for t in times]
    losses = ["" if each.loss is None else f"{each.loss:.4f}" for each in shown]
    left = [format_seconds(each.left_s) if each.left_s else "" for each in shown]
    # The only device of a machine, and processes, tell no more than the state.
    devices = {each.where for each in shown if each.state == RUNNING and each.where}
    hidden = devices if len(devices) == 1 or all(d.startswith("process ") for d in devices) else ()
    where = ["" if each.where in hidden and not each.job and not is_verbose() else each.where
             for each in shown]  # fmt: skip
    title = "job" if any(each.job for each in shown) else "where"
    return [
        *columns, Column("loss", losses, right=True, rank=2),
        Column("s/step" if is_slow else "ms/step", speeds, right=True, rank=4),
        Column("left", left, right=True, rank=3), Column(title, where, rank=1),
    ]  # fmt: skip


def _short_names(shown: Sequence[RunStatus]) -> list[str]:
    """Return the names of folders, cut where no other folder of the runs has this beginning."""
    parents = {each.paths.folder.parent for each in shown}
    names = {each.name for each in shown}
    for parent in parents:
        if parent.is_dir():
            names |= {path.name for path in parent.iterdir()}
    begun = Counter(name[:ID_DIGITS] for name in names)
    is_short = not is_verbose()
    return [s.name[:ID_DIGITS] if begun[s.name[:ID_DIGITS]] == 1 and is_short else s.name
            for s in shown]  # fmt: skip


def _importance(each: RunStatus) -> int:
    """Return a sort key: running, failed, waiting for a reason, finished, waiting."""
    if each.state not in _STYLES:
        return 1
    ranks = {RUNNING: 0, Outcome.refused.name: 1, Outcome.skipped.name: 1, Outcome.ok.name: 3}
    return ranks.get(each.state, 2 if each.where else 4)
