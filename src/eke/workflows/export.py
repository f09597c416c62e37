"""`eke export`: the model of a finished run as a folder for other libraries and for the hub.

A run's folder may belong to another user. Its files are copied without links and special files,
checked, and loaded from the copy.
"""

import os
import shlex
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eke.common.errors import ConfigError, EkeError, Fix, Problem, RunError
from eke.common.files import is_locked, is_trusted, open_file, read_json
from eke.common.paths import CHECKPOINT_FILES, EXPORT, RunPaths, SweepPaths, program, user_path
from eke.common.text import first_line, format_bytes, format_number
from eke.config.schema import Config, PretrainedModel
from eke.data.preparation.untrusted import LoadError, reading
from eke.plan.planner import MODEL, Plan, change_of, read_plan
from eke.plan.record import Outcome, Record, no_runs, read_record
from eke.plan.record.find_folder import find_folder
from eke.results.card import CARD, render_card

ADAPTER = "adapter_"
"""Prefix of PEFT's files."""


def export(run: str, folder: str, merge: bool = False, push: str | None = None) -> str:
    """Write the model of a finished run, and return a message with warnings.

    `folder` is new or empty, and errors do not change it. `merge` merges adapters into the weights
    of their base model. `push` is the name of a repository on the hub. A new one is private.
    """
    paths, target = find_run(run), user_path(folder).resolve()
    record = finished_record(paths)
    adapted = record.choices.get("peft", "none") != "none"
    plan = _plan_to_merge(paths) if merge and adapted else None
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        why = "is a folder with files" if target.is_dir() else "is a file"
        fix = Fix(remark="another name, or an empty folder")
        raise ConfigError(Problem("DIR", folder, why, fix, "folder_in_use"))
    send = _prepare_upload(push) if push else None
    try:
        card = render_card(record, merged=plan is not None)
        notes = [] if plan else _adapter_notes(record, adapted, merge)
    except Exception as error:  # another user's record may have any value
        raise EkeError(f"{paths.record}: does not describe a model ({error})") from error
    with _write_then_move(target) as unfinished:
        _copy_checked(paths.exported(record.model_step), unfinished)
        notes += _merge_adapter(plan, unfinished) if plan else []
        (unfinished / CARD).write_text(card, encoding="utf-8")
    sizes = [path.stat().st_size for path in target.rglob("*") if path.is_file()]
    kind = "model with its adapters merged" if plan else "adapter" if adapted else "model"
    size = f"{format_number(len(sizes), 'file')}, {format_bytes(sum(sizes))}"
    lines = [f"{folder}: {kind} ({size})", *(f"  warning: {note}" for note in notes)]
    return "\n".join([*lines, send(target)] if send else lines)


def _adapter_notes(record: Record, adapted: bool, merge: bool) -> list[str]:
    base = record.config.get("model", {}).get("name_or_path")
    if merge:
        return ["--merge has no effect: the run has no adapters"]
    if adapted and (base is None or Path(base).is_absolute()):
        where = f"the folder {base}" if base else "random weights, which are not saved"
        return [f"the adapter's base model is {where}. --merge exports a complete model"]
    return []


def find_run(run: str, command: str = "export", rest: str = "DIR") -> RunPaths:
    """Return the run of a folder, or of an id or its beginning in the default folder of runs."""
    places = [RunPaths(find_folder(run, "RUN")), RunPaths(user_path(Config().paths.runs) / run)]
    found = [paths for paths in places if paths.is_run]
    if SweepPaths(places[0].folder).sweep.exists():
        fix = Fix(remark=f"eke status {shlex.quote(run)} names its runs")
        raise ConfigError(Problem("RUN", run, "is a sweep, not a run", fix, "not_a_run"))
    if not found:
        raise ConfigError(no_runs([user_path(run)], command, usual=f"runs/ID {rest}".strip()))
    return found[0]


def newest_parts(paths: RunPaths, record: Record) -> Path | None:
    """Return the newest checkpoint in parts of a run without an exported model, else None."""
    if paths.exported(record.model_step).is_dir():
        return None
    folders = {path.parent for path in paths.checkpoints.glob("step-*/part-*")}
    return max(folders, default=None)


def finished_record(paths: RunPaths, stopped: bool = False) -> Record:
    """Return the record of a successful run with saved weights, or raise ConfigError.

    With `stopped`, also accept a run that ended with only a sharded checkpoint.
    """
    record = read_record(paths)
    if stopped and record and not is_locked(paths.lock) and newest_parts(paths, record):
        return record
    again = f"{program()} with the run's overrides"
    if record and is_trusted(paths.record):  # do not suggest another user's command
        again = shlex.join(record.command)
    if record is None or not Outcome[record.outcome].is_final:
        running = is_locked(paths.lock)
        state = "running" if running else record.outcome if record else "no record"
        fix = f"eke status {paths.folder}" if running else f"{again}   (continues it)"
        why = f"is not finished ({state})"
    elif record.outcome != Outcome.ok.name:
        why, fix = f"ended as {record.outcome}", f"eke logs {shlex.quote(str(paths.folder))}"
    elif not paths.exported(record.model_step).is_dir():
        why = f"has no checkpoint of step {record.model_step}"
        fix = f"{again} train.save_final=true rerun=true"
    else:
        return record
    raise ConfigError(Problem("RUN", str(paths.folder), why, Fix(remark=fix), "not_exportable"))


@contextmanager
def checked_model(paths: RunPaths, record: Record) -> Iterator[Path]:
    """Yield the folder of the run's model, or a copy if another user can change it.

    A sharded checkpoint is written to a temporary folder, at most 4 GB per file.
    """
    saved, parts = paths.exported(record.model_step), newest_parts(paths, record)
    if not parts and is_trusted(paths.record):
        yield saved
        return
    with tempfile.TemporaryDirectory(prefix="eke-") as made:
        if parts:
            _gather_model(read_plan(paths), record, parts, Path(made))
        else:
            _copy_checked(saved, Path(made))
        yield Path(made)


def _gather_model(plan: Plan, record: Record, parts: Path, folder: Path) -> None:
    """Write the model of an intact checkpoint in parts."""
    from eke.training.checkpoint import find_damage
    from eke.training.loop.environment import quiet_libraries  # slow: torch

    quiet_libraries(plan)
    from eke.training.model.save_parts import save_model

    if damage := find_damage(parts):
        again = f"{shlex.join(record.command)}   (continues from the last intact checkpoint)"
        raise EkeError(f"{parts}: {damage}\n  -> {again}")
    try:
        with reading(parts):
            save_model(plan, parts, folder)
    except OSError as error:
        fix = "TMPDIR=FOLDER with space for the model"
        raise EkeError(f"{folder}: {error.strerror or error}\n  -> {fix}") from error


def _plan_to_merge(paths: RunPaths) -> Plan:
    """Return the plan of a run whose base model is available and unchanged."""
    plan = read_plan(paths)
    if not isinstance(plan.config.model, PretrainedModel) and plan.device.kind != "cpu":
        why = "has adapters for random weights of a GPU, which were not saved"
        fix = Fix(remark="model=pretrained, or peft=none")
        raise ConfigError(Problem("RUN", str(paths.folder), why, fix, "not_exportable"))
    if found := change_of(plan, MODEL):
        why = f"the adapter's base model has changed ({found.partition(' -> ')[0]})"
        fix = Fix(remark="restore it, or export only the adapter without --merge")
        raise ConfigError(Problem("RUN", str(paths.folder), why, fix, "not_exportable"))
    return plan


@contextmanager
def _write_then_move(target: Path) -> Iterator[Path]:
    """Yield a temporary folder whose files are moved to `target` at the end."""
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    unfinished.mkdir()
    try:
        yield unfinished
        if target.is_dir():
            for path in unfinished.iterdir():
                shutil.move(path, target)
        else:
            unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _copy_checked(source: Path, target: Path) -> None:
    """Copy the listed files of a checkpoint's export. Raise EkeError for damaged files."""
    try:
        listed = read_json(source.parent / CHECKPOINT_FILES).items()
        inside = f"{EXPORT}/"
        wanted = {n.removeprefix(inside): list(v) for n, v in listed if n.startswith(inside)}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        why = f"not a readable list of its files ({error})"
        raise EkeError(f"{source.parent / CHECKPOINT_FILES}: {why}") from error
    there = {path.relative_to(source).as_posix(): path for path in source.rglob("*")}
    for name in wanted:
        if name not in there:
            raise EkeError(f"{source / name}: is missing, so the checkpoint is incomplete")
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        size, checksum = 0, 0
        with (
            open(open_file(there[name], os.O_RDONLY, shared=True), "rb") as old,
            open(target / name, "xb") as new,
        ):
            while block := old.read(1 << 20):
                new.write(block)
                size, checksum = size + len(block), zlib.crc32(block, checksum)
        if [size, checksum] != wanted[name]:
            raise EkeError(f"{there[name]}: is damaged: the run wrote another content")


def _merge_adapter(plan: Plan, folder: Path) -> list[str]:
    """Replace an adapter in `folder` by the merged model, and return warnings."""
    from eke.training.loop.environment import quiet_libraries  # slow: torch

    quiet_libraries(plan)
    from eke.training.model.save_model import save_merged_adapter

    try:
        with reading(folder):
            missing = save_merged_adapter(plan, folder, folder)
    except RunError as error:
        raise EkeError(f"cannot merge: {error.short().partition(' -> ')[0]}") from error
    except LoadError as error:
        fix = '\n  -> pip install "eke[all]"' if isinstance(error.__cause__, ImportError) else ""
        raise EkeError(f"cannot merge: {error.why}{fix}") from error
    for path in folder.glob(f"{ADAPTER}*"):
        path.unlink()
    return [missing] if missing else []


def _prepare_upload(name: str) -> Callable[[Path], str]:
    """Return a function that uploads a folder and returns its URL, or raise EkeError."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # 2.4: lazy

    def request(call: Callable[[], Any], fix: str) -> Any:
        try:
            return call()
        except Exception as error:  # OSError, ValueError, or an error of its HTTP library
            raise EkeError(f"--push {name}: {first_line(error)}\n  -> {fix}") from error

    api = HfApi()
    request(lambda: validate_repo_id(name), "--push OWNER/NAME")
    request(api.whoami, "hf auth login, and a connection")

    def send(folder: Path) -> str:
        again = f"hf upload {shlex.quote(name)} {shlex.quote(str(folder))}   (it is complete)"
        request(lambda: api.create_repo(name, private=True, exist_ok=True), again)
        found = request(lambda: api.upload_folder(repo_id=name, folder_path=folder), again)
        return str(found.repo_url)

    return send
