"""Upload of runs to W&B (`eke sync`), rebuilt from metrics.jsonl and record.json.

W&B's offline files are not used. They can be torn or empty, and `wandb sync` exits with 0 even if
no row arrived. See notes/tracking.md.
"""

import math
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from eke.common.errors import ConfigError, EkeError, Fix, Problem
from eke.common.files import is_locked, read_json
from eke.common.paths import RunPaths, SweepPaths
from eke.plan.record import no_runs
from eke.plan.record.find_folder import find_folder
from eke.results.trackers.accelerate import TrackioRun
from eke.results.trackers.sync import account
from eke.results.trackers.sync.account import Account, Content, NoAnswer, Receipt, Refusal
from eke.results.trackers.wandb import WandbRun


@dataclass(frozen=True)
class FoundRun:
    """Folder of a possible run."""

    paths: RunPaths
    is_named: bool = False
    """True if the folder is an argument, and not found in a folder of runs."""
    foreign: str = ""
    """Reason that it is not a run, empty for a run."""


def find_runs(arguments: Sequence[str]) -> list[FoundRun]:
    """Return the runs of folders without duplicates. Raise ConfigError for folders without a run.

    An argument is a run's folder, a folder of runs, a sweep's folder, or a file in one of them.
    """
    found: dict[Path, FoundRun] = {}
    problems = []
    for argument in arguments:
        path = find_folder(argument)
        try:
            hits = list(_find(path)) if path.exists() else []
        except (OSError, ValueError) as error:
            why = str(getattr(error, "strerror", None) or error)
            allow = f"chmod -R u+rwX {shlex.quote(argument)}   (or ask its owner)"
            fix = Fix(remark=allow if isinstance(error, PermissionError) else "eke sync runs")
            problems.append(Problem("DIR", argument, why, fix, "unreadable"))
            continue
        if all(hit.foreign for hit in hits):  # nothing found, or only folders that are not runs
            problems.append(no_runs([path], "sync"))
        for hit in hits:
            key = hit.paths.folder.resolve()
            if key not in found or hit.is_named:
                found[key] = hit
    if problems:
        raise ConfigError(problems)
    return list(found.values())


def _find(path: Path) -> Iterator[FoundRun]:
    """Yield the run at a path, the runs of a sweep, or all folders below but sweeps."""
    path = path.parent if path.is_file() else path
    paths = RunPaths(path.absolute())
    if SweepPaths(path).sweep.exists():
        yield from _cells(path)
    elif paths.is_run:
        yield FoundRun(paths, is_named=True)
    else:
        for child in sorted(path.iterdir()):
            is_other = child.name.startswith(".") or child.name == TrackioRun.package
            if is_other or not child.is_dir() or SweepPaths(child).sweep.exists():
                continue
            paths = RunPaths(child.absolute())
            why = "" if paths.is_run else "no record.json and no plan.json: not a run"
            yield FoundRun(paths, foreign=why)


def _cells(folder: Path) -> Iterator[FoundRun]:
    """Yield the runs of a sweep, next to its folder if both were moved, or raise ValueError."""
    file = SweepPaths(folder).sweep
    content: Any = read_json(file)
    cells = content.get("cells") if isinstance(content, dict) else None
    if not isinstance(cells, list):
        raise ValueError(f"{file.name} is not the file of a sweep")
    for cell in cells:
        name = cell.get("folder") if isinstance(cell, dict) else None
        if not isinstance(name, str) or not name:
            continue  # rejected, or not started
        moved = RunPaths(folder.absolute().parent / Path(name).name)
        paths = moved if moved.is_run else RunPaths(Path(name).absolute())
        yield FoundRun(paths, foreign="" if paths.is_run else "the sweep's run is gone")


class SyncOutcome(Enum):
    """Result for one folder."""

    sent = "sent"
    there = "there already"
    would = "would be sent"
    running = "running"
    skipped = "skipped"
    foreign = "not a run"
    busy = "busy"
    failed = "failed"


FAILURES = (SyncOutcome.failed, SyncOutcome.busy)
"""Outcomes that require another `eke sync`."""


@dataclass(frozen=True)
class Report:
    """One line of the table."""

    folder: Path
    verdict: SyncOutcome
    num_rows: int | None = None
    url: str = ""
    note: str = ""


@dataclass(frozen=True)
class Options:
    """Options of `eke sync`."""

    project: str | None = None
    """Project instead of each run's own."""
    entity: str | None = None
    dry_run: bool = False
    again: bool = False
    """True if to send runs again that the server has."""
    timeout_s: float = 60.0
    """Time limit of one upload without its rows, in seconds."""

    @property
    def answer_s(self) -> float:
        """Time limit of a request, in seconds."""
        return min(account.ANSWER_S, self.timeout_s)


def sync(found: Sequence[FoundRun], options: Options) -> Iterator[Report]:
    """Send the runs that the server lacks. Failures do not stop the others.

    Raises ConfigError without a valid API key, and NoAnswer or Refusal as `account.bounded`.
    """
    ids: dict[str, Path] = {}
    if options.dry_run:
        yield from (_report(each, None, options, ids, Path()) for each in found)
        return
    with account.session(options.answer_s) as (user, scratch):
        for each in found:
            report = _report(each, user, options, ids, scratch)
            yield report
            if report.verdict is SyncOutcome.failed and report.num_rows is not None:
                # If the server is down, stop: the next run would also wait.
                account.log_in(options.answer_s)


def _report(
    found: FoundRun, user: Account | None, options: Options, ids: dict[str, Path], scratch: Path
) -> Report:
    folder = found.paths.folder
    report = partial(Report, folder)
    if found.foreign:
        return report(SyncOutcome.foreign, note=found.foreign)
    if is_locked(found.paths.lock):
        return report(SyncOutcome.running, note="not sent. Repeat the command after its end")
    try:
        content = account.read_content(found.paths, options.project, options.entity)
        tracker = content.run.settings.option
        if tracker != "wandb" and not found.is_named:
            note = f"tracker={tracker}; name the folder itself to send it"
            return report(SyncOutcome.skipped, len(content.steps), note=note)
        if (other := ids.setdefault(content.run.run_id, folder)) != folder:
            return report(SyncOutcome.failed, note=f"the same run as {other}")
        if user is None:
            return report(SyncOutcome.would, len(content.steps), _target(content, ""))
        with account.lock_for_sync(found.paths) as is_sole:
            if not is_sole:
                return report(SyncOutcome.busy, note="another eke sync is sending it")
            return _send(found.paths, content, user, options, scratch)
    except EkeError as error:
        return report(SyncOutcome.failed, note=str(error))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        # For example a manually edited folder. The others continue.
        return report(SyncOutcome.failed, note=f"{type(error).__name__}: {error}")


def _target(content: Content, entity: str) -> str:
    """Return the path of a run in W&B's API: `entity/project/id`."""
    settings = content.run.settings
    parts = (settings.entity or entity, settings.project, content.run.run_id)
    return "/".join(filter(None, parts))


def _send(
    paths: RunPaths, content: Content, user: Account, options: Options, scratch: Path
) -> Report:
    """Send a run that the server lacks, and verify it on the server, else by acknowledgements."""
    path, settings, note = _target(content, user.entity), content.run.settings, ""
    receipt = Receipt(user.server, settings.entity or user.entity, settings.project, content.digest)
    report = partial(Report, paths.folder, num_rows=len(content.steps))
    failed = partial(report, SyncOutcome.failed)
    if not options.again:
        for known in account.read_receipts(paths):
            if known.place == receipt.place and known.digest == content.digest:
                return report(SyncOutcome.there, url=known.url, note=content.note)
        with suppress(Refusal):  # an account may have write permission only
            seen = account.fetch_server_state(path, options.answer_s)
            if seen is not None and not difference(content, seen):
                note = _keep_receipt(paths, replace(receipt, url=seen.url), content.note)
                return report(SyncOutcome.there, url=seen.url, note=note)
    if problem := upload(content, options, scratch):
        return failed(note=problem)
    try:
        seen = account.fetch_server_state(path, options.answer_s)
        if seen is None:
            return failed(note="the server has no such run")
        if found := difference(content, seen):
            return failed(url=seen.url, note=found)
        receipt = replace(receipt, url=seen.url)
    except (NoAnswer, Refusal) as error:
        note = f"acknowledged, but could not be read back: {error}"
    if account.content_digest(paths) != content.digest:
        note = "the run continued during the upload. Repeat the command to send the rest"
        return failed(url=receipt.url, note=note)
    note = _keep_receipt(paths, receipt, content.note, note)
    return report(SyncOutcome.sent, url=receipt.url, note=note)


def upload(content: Content, options: Options, scratch: Path) -> str:
    """Send all rows of a run, and return an error or "". Repeated rows replace each other."""
    run = replace(content.run, directory=Path(tempfile.mkdtemp(dir=scratch)))
    # 12,000 rows took 3.6 s on a loopback server. A real server may be 30 times slower.
    seconds = options.timeout_s + len(content.rows) / 100.0
    mirror = WandbRun(run, upload_s=seconds)
    mirror.prepare()

    def send() -> None:
        mirror.open()
        mirror.log(content.rows)
        mirror.summary(content.summary)
        mirror.close(content.exit_code)

    try:
        account.bounded(send, 1.25 * seconds)
    except (NoAnswer, Refusal) as error:
        return str(error)
    except BaseException:  # Ctrl-C: an upload must not delay the exit
        with suppress(Exception):
            mirror.kill()
        raise
    return ""


def difference(content: Content, seen: account.ServerState) -> str:
    """Return the first difference between run and server, "" if the server has the entire run."""
    steps = content.steps
    if seen.num_rows != len(steps):
        return f"{seen.num_rows} of {len(steps)} rows arrived"
    last = steps[-1] if steps else -1
    if seen.last_step not in (last, -1):  # not reported by some servers
        return f"the last row is of step {seen.last_step}, not of {last}"
    if seen.state == "running":
        return "the server still shows the run as running"
    for key, value in content.summary.items():
        there = seen.summary.get(key)
        is_close = there == value
        if isinstance(there, int | float) and isinstance(value, int | float):
            is_close = math.isclose(there, value, rel_tol=1e-9) or str(there) == str(value) == "nan"
        if not is_close:
            return f"the summary has {key} = {there}, not {value}"
    return ""


def _keep_receipt(paths: RunPaths, receipt: Receipt, *notes: str) -> str:
    """Write the receipt, and return the notes with a possible error."""
    try:
        account.add_receipt(paths, receipt)
    except OSError as error:
        notes = (*notes, f"no receipt kept ({error.strerror})")
    return "; ".join(filter(None, notes))
