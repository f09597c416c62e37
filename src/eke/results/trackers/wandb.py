"""Weights & Biases mirror, offline by default, and a reader of its file. Tested with wandb 0.31.

W&B's transaction log, `run-<id>.wandb`, is a LevelDB log (leveldb's doc/log_format.md) of protobuf
messages, with a header of 7 bytes and plain CRC-32 instead of CRC-32C.
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

from eke.common.files import make_private_dir
from eke.common.paths import RunPaths
from eke.config.schema import TrackerMode
from eke.plan.record import metrics
from eke.results.trackers.async_tracker import (
    EVAL,
    TRAIN,
    MirrorError,
    MissingRowFilter,
    Totals,
    TrackerClient,
    drawn,
)
from eke.results.trackers.tracker import Row, TrackedRun, Value

if TYPE_CHECKING:
    import wandb


HEADER_BYTES, BLOCK_BYTES = 7, 32 * 1024
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def count_rows(path: str | Path) -> int:
    """Return the number of history rows in W&B's file before the first damaged record."""
    found = records(Path(path).read_bytes())
    return sum(record.HasField("history") for _, record in found)


def records(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (end offset, message) of each intact record. Raise ValueError for other files."""
    # wandb 0.31 ships this generated module without type stubs.
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]  # wandb 0.31

    if struct.unpack("<4sH", data[:6].ljust(6, b"\0")) != (b":W&B", 0xBEE1):  # and its version
        raise ValueError("not a .wandb file: it does not begin with W&B's header")
    at, parts = HEADER_BYTES, list[bytes]()
    while at + HEADER_BYTES <= len(data):
        room = BLOCK_BYTES - at % BLOCK_BYTES
        if room < HEADER_BYTES:  # padding, as the header of a frame is not split
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
            yield at, Record.FromString(b"".join(parts))


_log = logging.getLogger(__name__)


class WandbRun(TrackerClient):
    """One attempt of a run in W&B, in `directory/wandb`. An upload may take `upload_s` seconds."""

    def __init__(self, run: TrackedRun, upload_s: float) -> None:
        self._run = run
        self._upload_s = upload_s
        self._wandb_run: wandb.Run  # `open` sets it
        self._num_steps = 0
        self._last_step = -1
        self._catch_up = MissingRowFilter(RunPaths(run.directory).metrics, run.attempt)
        self._totals = Totals(RunPaths(run.directory).metrics, run.attempt)

    def prepare(self) -> None:
        """Import wandb and start its helper process, wandb-core, without a connection."""
        # Changes of the environment and imports are safe only on the caller's thread.
        folder = self._run.directory / "wandb"
        make_private_dir(folder)
        # Otherwise W&B also sends telemetry offline, and waits 10 s for an unreachable host.
        os.environ["WANDB_ERROR_REPORTING"] = "false"
        # Folder of wandb-core's log: a home folder has a quota on many clusters.
        os.environ.setdefault("WANDB_CACHE_DIR", str(folder / "cache"))
        # The wandb-core of another process may have ended. The attempt decides about resuming.
        for name in ("WANDB_SERVICE", "WANDB_RESUME", "WANDB_RESUME_FROM", "WANDB_FORK_FROM"):
            os.environ.pop(name, None)
        import wandb

        # W&B logs each internal step. The run's log is for the user.
        logging.getLogger("wandb").propagate = False
        ignore_folder_settings()
        server = wandb.setup(self._make_settings()).settings.base_url
        if self._run.settings.mode is TrackerMode.online:
            _log.info("tracker: W&B's server is %s", server)

    def open(self) -> None:
        """Start the run. Raise MirrorError if W&B would write to another folder."""
        import wandb

        run, settings = self._run, self._run.settings
        self._wandb_run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            id=run.run_id,
            name=run.name,
            group=settings.group,
            job_type="train",
            # Tags of more than 64 characters make `wandb.init` raise.
            tags=list(dict.fromkeys(tag[:64] for tag in run.tags if tag)),
            notes=run.notes,
            config=make_config(run.factors, run.config),
            dir=str(run.directory),
            mode=settings.mode.value,
            # With "allow" for a first attempt, a repeated `wandb sync` would append the same rows.
            resume="allow" if run.attempt else None,
            reinit="finish_previous",
            settings=self._make_settings(),
        )
        # Without write permission W&B uses the temporary folder, which a cluster deletes.
        expected, folder = (run.directory / "wandb").resolve(), self._wandb_run.settings.sync_dir
        if not os.path.realpath(folder).startswith(f"{expected}{os.sep}"):
            raise MirrorError(f"W&B cannot write to {expected} and would write to {folder}")
        self._wandb_run.define_metric("*", step_metric=metrics.STEP)
        if settings.mode is TrackerMode.online:  # offline, the arrived rows are unknown
            last = self._wandb_run.starting_step - 1
            self._catch_up.seen = {TRAIN: last, EVAL: last}

    def log(self, rows: Sequence[Row]) -> None:
        """Log one W&B row for each step that the server lacks. Offline, log all steps."""
        is_online = self._run.settings.mode is TrackerMode.online
        wanted = self._catch_up.missing(rows) if is_online else rows
        for row in self._totals.add(wanted):
            # The rows of a step become one row of W&B, also if a resumed run repeats the step.
            step = int(row[metrics.STEP])
            self._wandb_run.log(drawn(row), step=step)
            self._num_steps += step > self._last_step
            self._last_step = max(step, self._last_step)

    def summary(self, values: Row) -> None:
        """Update the run's summary."""
        self._wandb_run.summary.update(dict(values))

    def close(self, exit_code: int) -> None:
        """Finish the run and end wandb-core. Raise MirrorError if data did not arrive."""
        import wandb

        settings = self._wandb_run.settings
        try:
            self._wandb_run.finish(exit_code)
        except TimeoutError:
            raise MirrorError(f"the upload did not end within {self._upload_s:g} s") from None
        finally:
            wandb.teardown()  # `finish` returns before the last records are written
        # W&B reports neither a rejected upload nor a full disk.
        written = count_rows(settings.sync_file)
        if written != self._num_steps:
            why = f"holds {written} of {self._num_steps} rows: is the disk full?"
            raise MirrorError(f"W&B's file {settings.sync_file} {why}")
        for line in Path(settings.log_internal).read_text(errors="replace").splitlines():
            if '"level":"ERROR+4"' in line:  # slog's name of the level four above ERROR
                error = " ".join(str(json.loads(line)["msg"]).split())
                raise MirrorError(f"the upload failed: {error}")

    def abandon(self) -> None:
        """End wandb-core. Otherwise a later `init` in this process would fail."""
        import wandb

        wandb.teardown()

    def kill(self) -> None:
        """Kill wandb-core."""
        kill_core()

    def _make_settings(self) -> "wandb.Settings":
        import wandb

        return wandb.Settings(
            mode=self._run.settings.mode.value,
            # Seconds of data that a killed run may lose. The default, 15 s, loses short runs.
            x_transaction_log_flush_interval=1.0,
            # With silent, a missing API key raises instead of prompting at the terminal.
            silent=True,
            console="off",
            symlink=False,
            finish_timeout=self._upload_s,
            finish_timeout_raises=True,
            # eke's record has code version, machine and packages, without the secrets of a git
            # remote. Sampling the machine would disturb measurements.
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
    """Make W&B ignore `wandb/settings` of the current folder. Call it before other calls to W&B.

    The author of that file could choose the server or proxy that receives the API key.
    """
    from wandb.sdk.wandb_settings import Settings

    unused = property(lambda _: os.devnull)
    Settings.settings_workspace = unused  # type: ignore[assignment, method-assign]  # no switch


def kill_core() -> None:
    """Kill this process's wandb-core, so that waiting calls raise. Linux only."""
    for listing in Path("/proc/self/task").glob("*/children"):
        for pid in listing.read_text().split():
            if Path(f"/proc/{pid}/comm").read_text().strip() == "wandb-core":
                os.kill(int(pid), signal.SIGKILL)


def make_config(factors: Mapping[str, Value], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return W&B's config: one scalar per factor, and the entire configuration under `cfg`."""
    # W&B would read a period in a name as nesting.
    scalars = {name.replace(".", "_"): option for name, option in factors.items()}
    return {**scalars, "cfg": dict(config)}
