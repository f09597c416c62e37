"""`eke evaluate`: metrics of a finished run's model on its evaluation samples or other data."""

import importlib.util
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from eke.common.errors import ConfigError, EkeError, Fix, Problem
from eke.common.files import read_json
from eke.common.paths import LOCAL_RANK, RANK, RENDEZVOUS_VARIABLE, WORLD_SIZE
from eke.common.text import align, format_number
from eke.config.compose import Composed, compose
from eke.config.schema import Config, Conversations, HubRows, LocalRows, Text
from eke.data.preparation.untrusted import reading
from eke.launch.processes.run_attempt import describe_exit
from eke.plan.own_code import Code, code_store, has_own_texts, serve_code
from eke.plan.planner import Plan, read_plan
from eke.plan.planner.samples import ROW_NUMBERS
from eke.plan.record import Record, metrics
from eke.workflows.export import checked_model, find_run, finished_record, newest_parts
from eke.workflows.generate import ByteTokens
from eke.workflows.planning import plan_for

if TYPE_CHECKING:
    from torch import Tensor

    from eke.training.batches.batches import MicroBatch
    from eke.training.distributed.ranks import Ranks

_log = logging.getLogger(__name__)

_OF_THE_EVALUATION = ("data", "precision", "attention", "hardware", "dataloader")
"""Groups that overrides may change. Other groups have the run's value, or for training defaults."""

EVAL_BATCH, LABELS, PROCESSES = (
    "batch.eval_per_device", "task.labels", "distributed.num_processes"
)  # fmt: skip
"""Further keys that overrides may change. Several processes of this machine share the weights."""

GENERATE, NEW_TOKENS = "evaluate.generate", "evaluate.max_new_tokens"
"""Keys of evaluations: whether to generate and compare answers, and maximum tokens of an answer."""

_MAX_NEW_TOKENS = 128


@dataclass(frozen=True)
class _EvaluationResult:
    """Metrics of an evaluation."""

    run: str
    step: int
    num_samples: int
    metrics: dict[str, float]
    classes: dict[str, Any]
    """Metrics of each class, as in a record."""


def evaluate_run(run: str, overrides: Sequence[str], trust: bool = False) -> _EvaluationResult:
    """Evaluate the model of a finished run, given by its folder or id, on all rows of the data.

    `trust` permits code of another user. Raises ConfigError if the run has no model, or an override
    is not of `_OF_THE_EVALUATION`, and EkeError if the model is damaged, or does not fit into
    memory.
    """
    paths = find_run(run, "evaluate", "")
    record = finished_record(paths, stopped=True)
    new_tokens, overrides = _generation(overrides)
    if new_tokens:  # each sample in its own row
        overrides = [*overrides, "data.packing=off"]
    trained = read_plan(paths)
    frozen = (trained.code, paths.folder) if trained.code else None
    if frozen and not trust and not has_own_texts(*frozen):
        why, fix = "has code of another user, which would run as yours", Fix("--trust")
        raise ConfigError(Problem("RUN", run, why, fix, "untrusted_file"))
    plan = evaluation_plan(trained, overrides, frozen)
    if new_tokens:
        _check_answers(plan)
    with checked_model(paths, record) as folder:
        job = plan, folder, record, trained, new_tokens
        row, classes = _measured(*job) if plan.batch.world_size == 1 else _in_ranks(*job)
    found = {key.removeprefix("eval/"): value for key, value in row.items()}
    parts = newest_parts(paths, record)
    step = int(parts.name.partition("-")[2]) if parts else record.model_step
    return _EvaluationResult(run, step, plan.steps.num_eval_samples, found, classes)


def _measured(
    plan: Plan, folder: Path, record: Record, trained: Plan, new_tokens: int
) -> tuple[metrics.Row, dict[str, Any]]:
    """Return metrics, and those of each class, as the only process or as a rank. Collective."""
    from eke.training.distributed.ranks import SINGLE_PROCESS, join_ranks
    from eke.training.loop.attempt import verify_inputs
    from eke.training.loop.environment import quiet_libraries
    from eke.training.loop.evaluation import measure
    from eke.training.loop.failure import is_out_of_memory
    from eke.training.model.attention_kernels import pinned_backend

    quiet_libraries(plan)
    serve_code(plan.code, code_store(plan.code) if plan.code else Path())
    with verify_inputs(plan), pinned_backend(plan):
        try:
            several = plan.batch.world_size > 1
            ranks = join_ranks(plan) if several else SINGLE_PROCESS
            job = _build(plan, folder, record, trained, ranks)
            row, classes = measure(job, even=several)
            return (row | _answers(job, new_tokens) if new_tokens else row), classes
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            import torch

            size = plan.batch.eval_per_device
            more = 2 * plan.batch.world_size
            fix = f"{PROCESSES}={more}, " * (torch.cuda.device_count() >= more)
            fix += "hardware=cpu, or a larger device"
            fix = f"{EVAL_BATCH}={size // 2}" if size > 1 else fix
            why = f"{plan.device.name} has no memory for {format_number(size, 'sample')} at a time"
            raise EkeError(f"{why}\n  -> {fix}") from error


def _in_ranks(plan: Plan, *job: Any) -> tuple[metrics.Row, dict[str, Any]]:
    """Return `_measured` of several processes, each with its shard of the weights."""
    from torch import multiprocessing

    spawning: Any = multiprocessing  # torch 2.13: not annotated
    results: Any = spawning.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="eke-") as folder:
        arguments = str(Path(folder) / "meeting"), results, plan, *job
        try:
            spawning.spawn(_as_rank, arguments, plan.batch.world_size)
        except spawning.ProcessExitedException as error:
            why = f"process {error.error_index}: {describe_exit(error.exit_code)}"
            raise EkeError(why) if results.empty() else results.get() from None
    found: tuple[metrics.Row, dict[str, Any]] = results.get()
    return found


def _as_rank(rank: int, meeting: str, results: Any, plan: Plan, *job: Any) -> None:
    """Put the result of rank 0, or the first error of a rank, which ends all."""
    import torch

    torch.set_num_threads(max(1, torch.get_num_threads() // plan.batch.world_size))
    place = {RANK: rank, LOCAL_RANK: rank, WORLD_SIZE: plan.batch.world_size}
    os.environ |= {RENDEZVOUS_VARIABLE: meeting, **{k: str(v) for k, v in place.items()}}
    try:
        found = _measured(plan, *job)
    except EkeError as error:
        results.put(error)
        raise SystemExit(1) from None
    if rank == 0:
        results.put(found)


def _generation(overrides: Sequence[str]) -> tuple[int, list[str]]:
    """Return the maximum tokens of an answer, 0 without generation, and the other overrides."""
    own = {k: v for k, _, v in (w.partition("=") for w in overrides) if k in (GENERATE, NEW_TOKENS)}
    rest = [word for word in overrides if word.partition("=")[0] not in own]
    asked, most = own.get(GENERATE, "false"), own.get(NEW_TOKENS, str(_MAX_NEW_TOKENS))
    if asked not in ("true", "false"):
        why = "must be true or false"
        raise ConfigError(Problem(GENERATE, asked, why, Fix(f"{GENERATE}=true"), "wrong_type"))
    if not most.isdecimal() or not int(most):
        fix = Fix(f"{NEW_TOKENS}={_MAX_NEW_TOKENS}")
        problem = Problem(NEW_TOKENS, most, "must be a positive integer", fix, "wrong_type")
        raise ConfigError(problem)
    return int(most) if asked == "true" else 0, rest


def _check_answers(plan: Plan) -> None:
    """Raise ConfigError unless answers can be generated and compared."""
    config = plan.config
    if plan.batch.world_size > 1:
        why, count = "must be 1: generated answers differ in length", str(plan.batch.world_size)
        raise ConfigError(Problem(PROCESSES, count, why, Fix(f"{PROCESSES}=1"), "single_only"))
    has_prompt = getattr(config.data, "prompt", None) or isinstance(config.data, Conversations)
    if not config.targets.is_generated or not has_prompt:
        why = "requires data with prompts and answers"
        fix = Fix("data.prompt=COLUMN", "data.response=COLUMN")
        raise ConfigError(Problem(GENERATE, "true", why, fix, "no_generation"))
    if importlib.util.find_spec("torchmetrics") is None:
        why, fix = "needs torchmetrics", Fix(remark='pip install "eke[metrics]"')
        raise ConfigError(Problem(GENERATE, "true", why, fix, "package_missing", passing=True))


def evaluation_plan(
    plan: Plan, overrides: Sequence[str], frozen: tuple[Code, Path] | None = None
) -> Plan:
    """Return the plan of an evaluation of a run's model, and of its `frozen` code."""
    typed = {k.lstrip("+~"): v for k, _, v in (word.partition("=") for word in overrides)}
    allowed = (*_OF_THE_EVALUATION, EVAL_BATCH, LABELS, PROCESSES)
    if wrong := [key for key in typed if not {key, key.split(".")[0]} & {*allowed}]:
        why = "has no effect on an evaluation, or would change the model"
        fix = Fix(remark=f"overrides of {', '.join(allowed)}")
        raise ConfigError([Problem(key, typed[key], why, fix, "no_effect") for key in wrong])
    kept = [word for word in plan.overrides if _is_kept(word, typed)]
    names_data = any(key in typed for key in ("data", "data.path", "data.name", "data.split"))
    fixed = ["batch=fixed", "batch.per_device=1", "train.steps=1", "tracker=none"]
    if EVAL_BATCH not in typed:
        fixed.append(f"{EVAL_BATCH}={plan.batch.eval_per_device}")
    if typed.get(PROCESSES, "1") != "1":
        fixed.append("distributed=fsdp")
    directory = Path(plan.config_dir) if plan.config_dir else None
    composed = compose([*kept, *overrides, *fixed], directory)
    if names_data or "data.eval_path" in typed:
        composed = _with_all_rows(composed, typed, names_data)
    return plan_for(composed, planning=True, frozen=frozen)


def _is_kept(word: str, typed: Mapping[str, str]) -> bool:
    """Return whether an override of the run applies to its evaluation."""
    key = word.partition("=")[0].lstrip("+~")
    group = key.partition(".")[0]
    if group not in Config.__dataclass_fields__:
        return group not in ("sweep", "recipe")  # an experiment's file may choose the model
    if group in (
        "model",
        "peft",
        "task",
        "seed",
        "loss",
        "metrics",
        "code",
    ):  # they determine the model
        return key not in typed
    if group not in ("data", "precision", "attention"):
        return False
    # Another option of a group may have other keys. Every option of data has these two.
    return key not in typed and (group not in typed or key in ("data.seq_len", "data.tokenizer"))


def _with_all_rows(composed: Composed, typed: Mapping[str, str], names_data: bool) -> Composed:
    """Return the configuration that evaluates all rows."""
    data = composed.config.data
    wanted: dict[str, Any] = {"num_eval_samples": 10**7}  # the maximum
    if names_data and isinstance(data, LocalRows):
        wanted["eval_path"] = data.path
    elif names_data and isinstance(data, HubRows):
        wanted["eval_split"] = data.split
    elif names_data and isinstance(data, Text):
        wanted["eval_frac"] = 1.0
    data = replace(data, **{k: value for k, value in wanted.items() if f"data.{k}" not in typed})
    return replace(composed, config=replace(composed.config, data=data))


def _build(plan: Plan, folder: Path, record: Record, trained: Plan, ranks: "Ranks") -> Any:
    """Return a job for `measure`, with the weights of the run and samples with its classes."""
    from eke.training.batches.batches import Transfer
    from eke.training.batches.dataset import build_data
    from eke.training.distributed.deepspeed_engine import parts_of
    from eke.training.distributed.fsdp import shard_model
    from eke.training.loop.training_state import build_checked, torch_device
    from eke.training.model.loss import build_loss
    from eke.training.model.number_formats import build_formats
    from eke.training.model.save_model import load_weights

    device = torch_device(plan)
    parts = parts_of(plan, device, ranks)
    model, report = build_checked(plan, device, parts)
    if parts:
        parts.put(model, lambda: shard_model(plan, model, parts.mesh))
    with reading(folder):
        load_weights(model, folder)
        known = list(record.classes.get("names", []))  # of an adapter
        if (folder / "config.json").is_file():
            found = read_json(folder / "config.json").get("id2label", {})
            known = [str(found[number]) for number in sorted(found, key=int)]
    names, numbers = _classes(plan, known, trained)
    if names:
        config: Any = model.config
        config.id2label = dict(enumerate(names))
    move = Transfer(device)
    return SimpleNamespace(
        plan=plan, device=device, model=model, bare_model=model, ranks=ranks,
        formats=build_formats(plan, device), loss=build_loss(plan, model),
        data=build_data(plan, left=report.padding == "left"),
        warn=_log.warning,
        transfer=move if numbers is None else lambda batch: move(_renumbered(batch, numbers)),
    )  # fmt: skip


def _renumbered(batch: "MicroBatch", numbers: "Tensor") -> "MicroBatch":
    """Replace the data's class numbers by the model's, `numbers` [classes]."""
    if batch.labels.dim() == 1:
        return replace(batch, labels=numbers[batch.labels])
    labels = batch.labels.new_zeros(batch.labels.shape)  # a column for each class
    labels[:, numbers] = batch.labels[:, : len(numbers)]
    return replace(batch, labels=labels)


def _classes(plan: Plan, known: list[str], trained: Plan) -> tuple[list[str], "Tensor | None"]:
    """Return the names of the model's classes, and their numbers for the data's classes."""
    import torch

    from eke.data.preparation.labels import matched
    from eke.training.batches.tasks import class_names

    found, column = class_names(plan), getattr(plan.config.data, "label", "")
    others = [note.reason for note in trained.decisions if note.key.startswith(ROW_NUMBERS)]
    if others and column and not found:
        rows, mine = others[0].partition(": ")[2], ", ".join(known)
        why = f"has numbers. 0, 1, ... were {rows} in the run's rows, {mine} in its model"
        fix = Fix(f"{LABELS}=[NAME,NAME]", remark="names of the numbers 0, 1, ... in these rows")
        raise ConfigError(Problem("data.label", column, why, fix, "other_classes"))
    if not known or not found:
        return known, None
    numbers = matched(found, known)
    if unknown := [name for name in found if name not in numbers]:
        why = f"has classes that the model was not trained on: {', '.join(unknown)}"
        fix = Fix("data.label=COLUMN", remark=f"classes of the model: {', '.join(known)}")
        raise ConfigError(Problem("data.label", column, why, fix, "other_classes"))
    return known, torch.tensor([numbers[name] for name in found])


def _answers(job: Any, new_tokens: int) -> metrics.Row:
    from eke.training.batches.dataset import load_plan_tokenizer
    from eke.training.loop.generation import generation_metrics
    from eke.training.model.save_model import set_eos_token_ids

    set_eos_token_ids(job.plan, job.bare_model)
    vocabulary = job.plan.vocabulary
    tokenizer = ByteTokens() if vocabulary.is_bytes else load_plan_tokenizer(job.plan)
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    batches = job.data.eval_batches(0, False)
    with job.formats.eval_autocast():
        return generation_metrics(job.bare_model, batches, decode, vocabulary.pad, new_tokens)


def render(found: _EvaluationResult) -> str:
    """Render the metrics, and the metrics of each class, as text."""
    rows = [(f"  {name}", f"{value:.4f}") for name, value in found.metrics.items()]
    lines = [f"{found.run}, step {found.step}: {found.num_samples} samples", *align(rows)]
    if found.classes:
        columns = ("precision", "recall", "f1")
        values = [[f"{value:.4f}" for value in found.classes[name]] for name in columns]
        support = [f"{count:.0f}" for count in found.classes["support"]]
        table = [("  class", *columns, "support")]
        names = [f"  {name}" for name in found.classes["names"]]
        table += zip(names, *values, support, strict=True)
        lines += ["", *align(table, right=range(1, 5))]
    return "\n".join(lines)
