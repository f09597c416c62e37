"""The user's account at W&B, and what the server says it has. Tested with wandb 0.31."""

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from eke.common.errors import ConfigError, EkeError
from eke.common.stdout import speak
from eke.results.trackers.async_tracker import describe
from eke.results.trackers.wandb import ignore_folder_settings, kill_core
from eke.rules.credentials import has_wandb_key

ANSWER_S = 20.0
"""Seconds the server gets to answer one question; W&B's own default is 19."""

T = TypeVar("T")


class NoAnswer(EkeError):
    """The server, or the way to it, does not answer."""


class Refusal(EkeError):
    """The server answered, and not with what was asked for."""


@dataclass(frozen=True)
class Seen:
    """What the server has of a run."""

    num_rows: int
    last_step: int
    """-1 without rows."""
    summary: dict[str, Any]
    state: str
    url: str


@dataclass(frozen=True)
class Account:
    """Whom W&B takes this user for."""

    server: str
    entity: str
    """The default one; empty if the server names none."""


def prepare(scratch: Path) -> None:
    """Have W&B keep its files in `scratch` and send no telemetry; name its server.

    Raises:
        ConfigError: there is no API key, or W&B is not installed.
    """
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        os.environ[name] = str(scratch)
    os.environ["WANDB_SILENT"] = "true"
    os.environ["WANDB_ERROR_REPORTING"] = "false"
    for name in ("WANDB_MODE", "WANDB_RUN_ID", "WANDB_RESUME", "WANDB_SERVICE"):
        os.environ.pop(name, None)
    if not has_wandb_key():
        raise ConfigError(
            "no API key for W&B -> wandb login   (or: export WANDB_API_KEY=...; "
            "for a server of your own WANDB_BASE_URL as well)"
        )
    try:
        from wandb.sdk.wandb_setup import singleton  # found missing here, and not in the middle
    except ModuleNotFoundError as error:
        raise ConfigError("the package wandb is not installed -> pip install wandb") from error
    ignore_folder_settings()
    speak(f"W&B's server: {singleton().settings.base_url}", sys.stderr)


def log_in(answer_s: float = ANSWER_S) -> Account:
    """Check the key with the server.

    Raises:
        ConfigError: the server refuses the key.
        NoAnswer: it does not answer.
        Refusal: it cannot be reached, or cannot tell.
    """
    try:
        return bounded(_log_in, answer_s)
    except Refusal as error:
        if any(word in str(error) for word in ("401", "403", "API key")):
            raise ConfigError(f"{error}\n  -> wandb login") from error
        raise


def look(path: str, answer_s: float = ANSWER_S) -> Seen | None:
    """What the server has of the run `entity/project/id`; None when it does not know it.

    Raises:
        NoAnswer: it does not answer.
        Refusal: it does not tell.
    """
    return bounded(lambda: _look(path), answer_s)


def bounded(ask: Callable[[], T], answer_s: float) -> T:
    """The result of a call that may hang.

    Raises:
        NoAnswer: it took longer; wandb-core, which it waited for, has been killed.
        Refusal: it raised.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(ask())
        except BaseException as error:  # wandb leaves by sys.exit, too
            errors.append(error)

    thread = threading.Thread(target=work, name="eke-sync-ask", daemon=True)
    thread.start()
    thread.join(answer_s)
    if results:
        return results[0]
    if not errors:
        kill_core()
        thread.join(1.0)
        give_up_core()
        raise NoAnswer(f"W&B's server did not answer within {answer_s:g} s")
    give_up_core()
    raise Refusal(describe(errors[0]).removeprefix("stopped by "))


def give_up_core() -> None:
    """End wandb-core, in whatever state it is."""
    import wandb

    with suppress(BaseException):  # it leaves by sys.exit if wandb-core died
        wandb.teardown()


def _log_in() -> Account:
    import wandb

    api = wandb.Api(timeout=int(ANSWER_S))
    return Account(server=api.settings["base_url"], entity=api.default_entity or "")


def _look(path: str) -> Seen | None:
    import wandb

    api = wandb.Api(timeout=int(ANSWER_S))
    try:
        run = api.run(path)
    except Exception as error:  # RunNotFoundError, which wandb 0.31 may wrap in another
        if "Could not find run" in str(error):
            return None
        raise
    summary = dict(run.summary_metrics or {})
    num_rows = int(run.historyLineCount or 0)
    last = run.lastHistoryStep if num_rows else -1
    return Seen(num_rows, int(last), summary, run.state, run.url)
