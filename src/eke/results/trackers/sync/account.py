"""W&B account, content of a run to send, receipts and lock. Tested with wandb 0.31."""

import hashlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from eke.common.errors import ConfigError, EkeError, Fix, Problem
from eke.common.files import open_file, read_bytes, read_json, try_lock, write_json
from eke.common.output import write_line
from eke.common.paths import RunPaths
from eke.config import schema
from eke.plan.planner import outline_record, read_plan
from eke.plan.record import RECORD_LIMIT, Outcome, metrics, read_attempts, read_record, table
from eke.results.trackers.async_tracker import deduplicate, one_line
from eke.results.trackers.tracker import TrackedRun, Value, summary_values, tracked_run
from eke.results.trackers.wandb import ignore_folder_settings, kill_core
from eke.rules.tracker import has_wandb_key

ANSWER_S = 20.0
"""Time limit of one request, in seconds. W&B's default is 19 s."""

_T = TypeVar("_T")


class NoAnswer(EkeError):
    """The server does not answer."""

    id = "no_answer"


class Refusal(EkeError):
    """The server rejected the request."""

    id = "rejected_request"


class ServerState(NamedTuple):
    """State of a run on the server."""

    num_rows: int
    last_step: int
    """Last step, -1 without rows."""
    summary: dict[str, Any]
    state: str
    url: str


class Account(NamedTuple):
    """The user's W&B account."""

    server: str
    entity: str
    """Default entity, empty if there is none."""


def log_in(answer_s: float = ANSWER_S) -> Account:
    """Return the account of the API key. Raise ConfigError if it is rejected, or as `bounded`."""

    def request() -> Account:
        import wandb

        api = wandb.Api(timeout=int(ANSWER_S))
        return Account(server=api.settings["base_url"], entity=api.default_entity or "")

    try:
        return bounded(request, answer_s)
    except Refusal as error:
        if any(word in str(error) for word in ("401", "403", "API key")):
            problem = Problem("W&B", "", str(error), Fix(remark="wandb login"), "missing_login")
            raise ConfigError(problem) from error
        raise


@contextmanager
def session(answer_s: float = ANSWER_S) -> Iterator[tuple[Account, Path]]:
    """Yield the account and a folder for W&B's files. Raise ConfigError without a valid API key."""
    with tempfile.TemporaryDirectory(prefix="eke-wandb-", ignore_cleanup_errors=True) as scratch:
        os.environ.update(WANDB_SILENT="true", WANDB_ERROR_REPORTING="false")
        os.environ |= dict.fromkeys(("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"), scratch)
        for name in ("WANDB_MODE", "WANDB_RUN_ID", "WANDB_RESUME", "WANDB_SERVICE"):
            os.environ.pop(name, None)
        if not has_wandb_key():
            other = "export WANDB_API_KEY=...; for a private server also WANDB_BASE_URL"
            fix = Fix(remark=f"wandb login   (or: {other})")
            raise ConfigError(Problem("W&B", "", "has no API key", fix, "missing_login"))
        from wandb.sdk.wandb_setup import singleton

        ignore_folder_settings()
        write_line(f"W&B's server: {singleton().settings.base_url}", sys.stderr)
        try:
            yield log_in(answer_s), Path(scratch)
        finally:
            _give_up_core()


def fetch_server_state(path: str, answer_s: float = ANSWER_S) -> ServerState | None:
    """Return the state of the run `entity/project/id`, None if unknown. Raise as `bounded`."""

    def request() -> ServerState | None:
        import wandb

        try:
            run = wandb.Api(timeout=int(ANSWER_S)).run(path)
        except Exception as error:  # RunNotFoundError, which wandb 0.31 may wrap
            if "Could not find run" in str(error):
                return None
            raise
        summary = dict(run.summary_metrics or {})
        num_rows = int(run.historyLineCount or 0)
        last = run.lastHistoryStep if num_rows else -1
        return ServerState(num_rows, int(last), summary, run.state, run.url)

    return bounded(request, answer_s)


def bounded(request: Callable[[], _T], answer_s: float) -> _T:
    """Run a call that may hang. Raise NoAnswer after the time limit, Refusal if it raised."""
    results: list[_T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(request())
        except BaseException as error:  # wandb also calls sys.exit
            errors.append(error)

    thread = threading.Thread(target=work, name="eke-sync-ask", daemon=True)
    thread.start()
    thread.join(answer_s)
    if results:
        return results[0]
    if not errors:
        kill_core()
        thread.join(1.0)
        _give_up_core()
        raise NoAnswer(f"W&B's server did not answer within {answer_s:g} s")
    _give_up_core()
    raise Refusal(one_line(errors[0]))


def _give_up_core() -> None:
    """End wandb-core, also if it hangs."""
    import wandb

    with suppress(BaseException):  # it calls sys.exit if wandb-core died
        wandb.teardown()


@dataclass(frozen=True)
class Content:
    """One run to send."""

    run: TrackedRun
    rows: list[metrics.Row]
    """One row per step and kind, of the highest attempt."""
    summary: Mapping[str, Value]
    exit_code: int
    digest: str
    note: str = ""
    """Unreadable parts."""

    @property
    def steps(self) -> list[int]:
        """Distinct steps. W&B counts them as rows."""
        return sorted({int(row[metrics.STEP]) for row in self.rows})


def content_digest(paths: RunPaths) -> str:
    """Return the SHA-256 of the files with a run's content. Raise OSError if one is unreadable."""
    state = hashlib.sha256()
    limits = {paths.record: RECORD_LIMIT, paths.metrics: metrics.METRICS_LIMIT}
    for path, limit in limits.items():
        data = read_bytes(path, limit) if path.exists() else b""
        state.update(f"{len(data)} ".encode() + data)
    return state.hexdigest()


def read_content(paths: RunPaths, project: str | None, entity: str | None) -> Content:
    """Read the content of a run for W&B. `project` and `entity` replace the run's own."""
    digest = content_digest(paths)
    rows, unreadable = metrics.read_rows(paths.metrics)
    record = read_record(paths)
    if record is None:  # worker and supervisor were killed before writing one
        attempt: Any = max(len(read_attempts(paths)) - 1, 0)
        record = outline_record(read_plan(paths), rows, attempt, Outcome.crashed, None)
    known = table(record.config, "tracker")
    settings = schema.Tracker(
        option=str(known.get("option", "wandb")),
        mode=schema.TrackerMode.online,
        project=project or str(known.get("project") or "eke"),
        entity=entity or known.get("entity"),
        group=known.get("group"),
    )
    run = tracked_run(record, paths, 0, settings)  # one attempt, so that sending is idempotent
    note = f"{unreadable} unreadable lines skipped" if unreadable else ""
    kept = deduplicate(rows)
    return Content(run, kept, summary_values(record, rows), record.exit_code, digest, note)


@dataclass(frozen=True)
class Receipt:
    """Receipt of one run at one destination."""

    server: str
    entity: str
    project: str
    digest: str
    """Hash of the sent files. It differs if the run has continued."""
    url: str = ""

    @property
    def place(self) -> tuple[str, str, str]:
        """Server, entity and project."""
        return (self.server, self.entity, self.project)


def read_receipts(paths: RunPaths) -> list[Receipt]:
    """Return all receipts, or none if the file is missing or invalid (the run is sent again)."""
    try:
        content: Any = read_json(paths.receipt)
        names = [each.name for each in fields(Receipt)]  # older files have more
        return [Receipt(*(entry[name] for name in names)) for entry in content["sent"]]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def add_receipt(paths: RunPaths, receipt: Receipt) -> None:
    """Write a receipt instead of an older one for the same destination. Raise OSError."""
    others = [other for other in read_receipts(paths) if other.place != receipt.place]
    write_json(paths.receipt, {"sent": [asdict(entry) for entry in (*others, receipt)]})


@contextmanager
def lock_for_sync(paths: RunPaths) -> Iterator[bool]:
    """Lock a run against other `eke sync` processes, and yield whether no other has the lock."""
    with ExitStack() as held:
        is_sole = True  # without locks (read-only folder): sending a run twice is harmless
        with suppress(OSError):
            descriptor = open_file(paths.sync_lock, os.O_RDWR | os.O_CREAT)
            held.callback(os.close, descriptor)
            is_sole = try_lock(descriptor)  # raises on a file system without locks
        yield is_sole
