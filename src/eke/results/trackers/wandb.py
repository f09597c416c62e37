"""Weights & Biases mirror, offline by default, and a reader of its file. Tested with wandb 0.31.

W&B's transaction log, `run-<id>.wandb`, is a LevelDB log (blocks of 32 KiB, records cut into
frames; leveldb's doc/log_format.md) of protobuf messages, with two differences: a header of 7
bytes, and plain CRC-32 where LevelDB has CRC-32C.
"""

import json
import logging
import os
import signal
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eke.common.files import own_folder
from eke.common.paths import RunPaths
from eke.config.schema import TrackerMode
from eke.plan.record import metrics
from eke.results.trackers.async_tracker import (
    EVAL,
    TRAIN,
    CatchUp,
    Mirror,
    MirrorError,
    Totals,
    drawn,
)
from eke.results.trackers.tracker import Row, TrackedRun, Value

if TYPE_CHECKING:
    import wandb


HEADER_BYTES, BLOCK_BYTES = 7, 32 * 1024
MAGIC, VERSION = b":W&B", 0xBEE1
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def count_rows(path: str | Path) -> int:
    """Rows of history in W&B's file, up to the first torn or damaged record; else ValueError."""
    found = records(Path(path).read_bytes())
    return sum(record.HasField("history") for _, record in found)


def _frames(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(end offset, content) of every complete record; stops at the first torn or damaged one."""
    at, parts = HEADER_BYTES, list[bytes]()
    while at + HEADER_BYTES <= len(data):
        room = BLOCK_BYTES - at % BLOCK_BYTES
        if room < HEADER_BYTES:  # a frame's header is never split: the rest of the block is padding
            at += room
            continue
        checksum, size, kind = struct.unpack_from("<IHB", data, at)
        start, at = at + HEADER_BYTES, at + HEADER_BYTES + size
        body = data[start:at]
        is_known = kind in (FULL, FIRST, MIDDLE, LAST) and len(body) == size
        if not is_known or zlib.crc32(body, zlib.crc32(bytes([kind]))) != checksum:
            return
        parts = [body] if kind in (FULL, FIRST) else [*parts, body]
        if kind in (FULL, LAST):
            yield at, b"".join(parts)


def records(data: bytes) -> Iterator[tuple[int, Any]]:
    """(end offset, protobuf message) of every complete record; ValueError: no file of W&B's."""
    # wandb 0.31 ships this generated module without type stubs.
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]  # wandb 0.31

    if struct.unpack("<4sH", data[:6].ljust(6, b"\0")) != (MAGIC, VERSION):
        raise ValueError("not a .wandb file: it does not begin with W&B's header")
    for end, content in _frames(data):
        yield end, Record.FromString(content)


_log = logging.getLogger(__name__)

MAX_TAG_CHARACTERS = 64
"""Longer tags make `wandb.init` raise."""
FLUSH_INTERVAL_S = 1.0
"""Seconds of data a killed run may lose. W&B's default of 15 s loses short runs whole."""
STEP = metrics.STEP
"""The x axis, and W&B's own `_step` as well: the training and the evaluation row of a step become
one row of W&B's, and a step that is repeated after a resume cannot become a second one."""


class WandbRun(Mirror):
    """One attempt of a run in W&B; its files lie in `directory/wandb`.

    The end of an online run may spend `upload_s` on uploading before it is left on disk.
    """

    def __init__(self, run: TrackedRun, upload_s: float) -> None:
        self._run = run
        self._upload_s = upload_s
        self._wandb_run: wandb.Run | None = None
        self._num_steps = 0
        self._last_step = -1
        self._catch_up = CatchUp(RunPaths(run.directory).metrics, run.attempt)
        self._totals = Totals(RunPaths(run.directory).metrics, run.attempt)

    def prepare(self) -> None:
        """Import wandb and start its helper process, wandb-core; no connection is made.

        On the caller's thread: nowhere else is it safe to change the environment, or to import
        while the caller imports too. Raises OSError if the folder cannot be made.
        """
        folder = self._run.directory / "wandb"
        own_folder(folder)
        # Otherwise W&B sends telemetry offline too, and waits 10 s for a host that never answers.
        os.environ["WANDB_ERROR_REPORTING"] = "false"
        # wandb-core's own log; a home folder has a quota on many clusters.
        os.environ.setdefault("WANDB_CACHE_DIR", str(folder / "cache"))
        # The address of another process's wandb-core, which may be gone by now; and whether a run
        # is continued follows from its attempt, never from what is set outside.
        for name in ("WANDB_SERVICE", "WANDB_RESUME", "WANDB_RESUME_FROM", "WANDB_FORK_FROM"):
            os.environ.pop(name, None)
        import wandb

        # W&B tells its own log of every step it takes; the run's log is for the user.
        logging.getLogger("wandb").propagate = False
        ignore_folder_settings()
        server = wandb.setup(self._make_settings()).settings.base_url
        if self._run.settings.mode is TrackerMode.online:
            _log.info("tracker: W&B's server is %s", server)

    def open(self) -> None:
        """Start the run (`wandb.init`); raises MirrorError if W&B would write somewhere else."""
        import wandb

        run, settings = self._run, self._run.settings
        self._wandb_run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            id=run.run_id,
            name=run.name,
            group=settings.group,
            job_type="train",
            tags=list(dict.fromkeys(tag[:MAX_TAG_CHARACTERS] for tag in run.tags if tag)),
            notes=run.notes,
            config=make_config(run.factors, run.config),
            dir=str(run.directory),
            mode=settings.mode.value,
            # A first attempt starts the run, later ones append to it. With "allow" from the start,
            # a repeated `wandb sync` would append the same rows again.
            resume="allow" if run.attempt else None,
            reinit="finish_previous",
            settings=self._make_settings(),
        )
        # W&B falls back to the temporary folder, which a cluster wipes, when it may not write.
        expected, folder = (run.directory / "wandb").resolve(), self._wandb_run.settings.sync_dir
        if not os.path.realpath(folder).startswith(f"{expected}{os.sep}"):
            raise MirrorError(f"W&B cannot write to {expected} and would write to {folder}")
        self._wandb_run.define_metric("*", step_metric=STEP)
        if settings.mode is TrackerMode.online:  # offline, the arrived rows are unknown
            last = self._wandb_run.starting_step - 1
            self._catch_up.seen = {TRAIN: last, EVAL: last}

    def log(self, rows: Sequence[Row]) -> None:
        """One W&B row for each step; online, only for the steps that the server lacks."""
        assert self._wandb_run is not None, "open comes first"
        is_online = self._run.settings.mode is TrackerMode.online
        wanted = self._catch_up.missing(rows) if is_online else rows
        for row in self._totals.add(wanted):
            step = int(row[STEP])
            self._wandb_run.log(drawn(row), step=step)
            self._num_steps += step > self._last_step
            self._last_step = max(step, self._last_step)

    def summary(self, values: Row) -> None:
        """Set values of the run's summary."""
        assert self._wandb_run is not None, "open comes first"
        self._wandb_run.summary.update(dict(values))

    def close(self, exit_code: int) -> None:
        """Finish the run, end wandb-core and count what it wrote.

        Raises MirrorError for a failed or slow upload and for missing rows: of a refused upload and
        of a full disk W&B itself says nothing.
        """
        import wandb

        assert self._wandb_run is not None, "open comes first"
        settings = self._wandb_run.settings
        try:
            self._wandb_run.finish(exit_code)
        except TimeoutError:
            why = f"the upload did not end within {self._upload_s:g} s"
            raise MirrorError(why) from None
        finally:
            wandb.teardown()  # `finish` returns before the last records are written
        written = count_rows(settings.sync_file)
        if written != self._num_steps:
            why = f"holds {written} of {self._num_steps} rows: is the disk full?"
            raise MirrorError(f"W&B's file {settings.sync_file} {why}")
        if error := find_fatal_error(Path(settings.log_internal)):
            raise MirrorError(f"the upload failed: {error}")

    def abandon(self) -> None:
        """End wandb-core; a later `init` in this process would fail otherwise."""
        import wandb

        wandb.teardown()

    def kill(self) -> None:
        """Kill wandb-core."""
        kill_core()

    def _make_settings(self) -> "wandb.Settings":
        import wandb

        return wandb.Settings(
            mode=self._run.settings.mode.value,
            x_transaction_log_flush_interval=FLUSH_INTERVAL_S,
            # Silent also means that a missing API key raises instead of asking at the terminal.
            silent=True,
            console="off",
            symlink=False,
            finish_timeout=self._upload_s,
            finish_timeout_raises=True,
            # eke's record has code version, machine and packages, without the secrets that a git
            # remote may hold. Sampling the machine would disturb what is measured.
            save_code=False,
            disable_code=True,
            disable_git=True,
            disable_job_creation=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )


def ignore_folder_settings() -> None:
    """Have W&B read this user's own settings file alone; before its first question.

    Who can write `wandb/settings` in the current folder would name the server, or the proxy, that
    the API key is sent to.
    """
    from wandb.sdk.wandb_settings import Settings

    nothing = property(lambda _: os.devnull)
    Settings.settings_workspace = nothing  # type: ignore[assignment, method-assign]  # no switch


def kill_core() -> None:
    """Kill this process's wandb-core; waiting calls raise. Linux only."""
    for listing in Path("/proc/self/task").glob("*/children"):
        for pid in listing.read_text().split():
            if Path(f"/proc/{pid}/comm").read_text().strip() == "wandb-core":
                os.kill(int(pid), signal.SIGKILL)


def find_fatal_error(log: Path) -> str:
    """Upload error in wandb-core's log; empty if there was none.

    One JSON object a line; slog writes a level four above ERROR as `ERROR+4`.
    """
    for line in log.read_text(errors="replace").splitlines():
        if '"level":"ERROR+4"' in line:
            return " ".join(str(json.loads(line)["msg"]).split())
    return ""


def make_config(factors: Mapping[str, Value], config: Mapping[str, Any]) -> dict[str, Any]:
    """W&B's config: one scalar per factor, to group by, and the whole configuration under `cfg`.

    A period in a name would be read as nesting, so it becomes an underscore.
    """
    scalars = {name.replace(".", "_"): option for name, option in factors.items()}
    return {**scalars, "cfg": dict(config)}
