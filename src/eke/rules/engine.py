"""Rules about the training loop and about arguments in `trainer.extra`."""

import ast
import functools
from types import UnionType
from typing import Any

from eke.common.errors import Fix, Problem
from eke.common.text import format_value, override, suggest_match
from eke.config.schema import Config
from eke.models.checkpoints.architecture import models_folder
from eke.rules.rule import Rule, RuleInputs, without_effect


def _takes_no_steps(facts: RuleInputs) -> str:
    """Return the override that replaces the optimizer step, "" if there is none."""
    config = facts.config
    # Trainer requires the full training state on each rank.
    if config.distributed.option not in ("none", "ddp"):
        return f"distributed={config.distributed.option}"
    return "memory.optimizer_in_backward=true" if config.memory.optimizer_in_backward else ""


RULES = dict(
    trainer_takes_plain_steps=Rule(
        key="engine",
        when=lambda f: f.config.engine.option == "trainer" and _takes_no_steps(f),
        why=lambda f: f"conflicts with {_takes_no_steps(f)}, which replaces Trainer's steps",
        source="src/eke/training/loop/trainer_engine.py",
    ),
    extra_needs_trainer=without_effect(
        key="trainer.extra",
        when=lambda f: f.config.trainer.extra and f.config.engine.option != "trainer",
        value=lambda f: ", ".join(f.config.trainer.extra),
        why=lambda f: f"engine={f.config.engine.option} does not read arguments of Trainer",
        fix=Fix("engine=trainer"),
        source="src/eke/training/loop/trainer_engine.py",
    ),
)

_PREFIX = "trainer.extra."
_REMOVE = Fix(remark="remove it")

_OWNED = {
    "paths.runs": "output_dir",
    "batch.per_device": "per_device_train_batch_size auto_find_batch_size",
    "batch.eval_per_device": "per_device_eval_batch_size",
    "batch.accumulation": "gradient_accumulation_steps",
    "train.epochs": "num_train_epochs",
    "train.steps": "max_steps",
    "train.max_grad_norm": "max_grad_norm",
    "train.log_every": "logging_strategy logging_steps logging_first_step",
    "train.eval_every": "eval_strategy eval_steps eval_delay eval_on_start",
    "train.checkpoint_every": "save_strategy save_steps",
    "train.save_on_signal": "enable_jit_checkpoint",
    "train.keep_checkpoints": "save_total_limit",
    "train.stop_on_nonfinite": "logging_nan_inf_filter",
    "optimizer": "optim optim_args optim_target_modules",
    "optimizer.lr": "learning_rate",
    "optimizer.weight_decay": "weight_decay",
    "optimizer.beta1": "adam_beta1",
    "optimizer.beta2": "adam_beta2",
    "optimizer.eps": "adam_epsilon",
    "schedule": "lr_scheduler_type lr_scheduler_kwargs",
    "schedule.warmup_steps": "warmup_steps",
    "schedule.warmup_frac": "warmup_ratio",
    "precision": "bf16 fp16 bf16_full_eval fp16_full_eval",
    "precision.tf32": "tf32",
    "memory": "activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing "
    "gradient_checkpointing_kwargs",
    "compile": "torch_compile torch_compile_backend torch_compile_mode",
    "kernels": "use_liger_kernel liger_kernel_config",
    "tracker": "report_to trackio_space_id trackio_bucket_id trackio_static_space_id",
    "tracker.group": "run_name",
    "tracker.project": "project",
    "seed": "seed data_seed",
    "hardware": "use_cpu",
    "rerun": "resume_from_checkpoint ignore_data_skip restore_callback_states_from_checkpoint",
    "dataloader.workers": "dataloader_num_workers",
    "dataloader.pin_memory": "dataloader_pin_memory",
    "dataloader.persistent": "dataloader_persistent_workers",
    "dataloader.prefetch": "dataloader_prefetch_factor",
    "data.length_grouping": "train_sampling_strategy length_column_name group_by_length",
    "distributed": "fsdp fsdp_config deepspeed parallelism_config ddp_backend local_rank",
    "distributed.timeout_s": "ddp_timeout",
}
OWNED = {argument: key for key, names in _OWNED.items() for argument in names.split()}
"""Argument of Trainer -> the key that sets it in eke."""

_UNREAD = {
    "eke computes the loss, a mean over all targets of the global batch":
        "average_tokens_across_devices label_names",
    "eke loads the samples and decides their order":
        "dataloader_drop_last dataloader_multiprocessing_context dataloader_in_order "
        "remove_unused_columns",
    "eke evaluates the same samples each time":
        "prediction_loss_only eval_do_concat_batches eval_use_gather_object "
        "eval_accumulation_steps include_for_metrics batch_eval_metrics do_eval do_predict",
    "eke writes the checkpoints and does not upload them":
        "save_only_model save_on_each_node push_to_hub hub_token hub_private_repo hub_model_id "
        "hub_strategy hub_always_push hub_revision load_best_model_at_end metric_for_best_model "
        "greater_is_better",
    "eke writes the log and the metrics":
        "log_level log_level_replica log_on_each_node disable_tqdm skip_memory_metrics "
        "include_num_input_tokens_seen",
    "eke always trains": "do_train",
}  # fmt: skip
UNREAD = {argument: why for why, names in _UNREAD.items() for argument in names.split()}
"""Argument -> why it has no effect."""

_KINDS: dict[str, tuple[type | UnionType, str]] = {
    "bool": (bool, "true or false"),
    "int": (int, "a whole number"),
    "float": (int | float, "a number"),
    "str": (str, "text"),
    "list": (list, "a list"),
    "dict": (dict, "a mapping"),
    "None": (type(None), "null"),
}
"""Type in an annotation -> accepted types and name in messages."""


def find_argument_problems(config: Config) -> list[Problem]:
    """Return a problem for each invalid argument in `trainer.extra`."""
    extra = config.trainer.extra
    found = {name: _reason(config, name, value) for name, value in extra.items()}
    return [
        Problem(_PREFIX + name, format_value(extra[name]), *reason, "trainer_argument")
        for name, reason in found.items()
        if reason
    ]


def _reason(config: Config, name: str, value: Any) -> tuple[str, Fix] | None:
    arguments = read_arguments()
    if key := OWNED.get(name):
        return f"is set by {key}", Fix(override(key, value))
    if name in UNREAD:
        return f"has no effect: {UNREAD[name]}", _REMOVE
    if name not in arguments:
        near = suggest_match(name, arguments)
        if not near:
            return "unknown argument of TrainingArguments", _REMOVE
        why = f"unknown argument of TrainingArguments. Did you mean {near}?"
        return why, Fix(override(f"{_PREFIX}{near}", value))
    kinds, default = arguments[name]
    if not _is_one_of(kinds, value):
        words = " or ".join(_KINDS[kind][1] for kind in kinds) or "unset"
        fix = Fix(f"{_PREFIX}{name}={default}") if default else _REMOVE
        return f"must be {words}", fix
    if name == "label_smoothing_factor" and value and config.task.problem.value != "single":
        return f"task.problem={config.task.problem.value} does not support smoothing", _REMOVE
    if name.startswith("ddp_") and config.distributed.num_processes == 1:
        return "needs several processes", Fix("distributed=ddp")
    return None


def _is_one_of(kinds: tuple[str, ...], value: Any) -> bool:
    """Return whether a value has one of the types. Booleans are not numbers."""
    if isinstance(value, bool):
        return "bool" in kinds
    return any(isinstance(value, _KINDS[kind][0]) for kind in kinds)


@functools.cache
def read_arguments() -> dict[str, tuple[tuple[str, ...], str]]:
    """Return argument -> its types (keys of `_KINDS`) and default ("" if it has none)."""
    # Read the source of the installed transformers: an import takes seconds and loads torch.
    source = (models_folder().parent / "training_args.py").read_text(encoding="utf-8")
    [body] = [
        node.body
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "TrainingArguments"
    ]
    found = {}
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            named = {_name(part) for part in ast.walk(node.annotation)}
            if any(n.endswith(("Strategy", "Type", "Names")) for n in named):
                named.add("str")  # an enum of transformers is set as text
            kinds = tuple(kind for kind in _KINDS if kind in named)
            found[node.target.id] = kinds, _default(node.value)
    return found


def _name(part: ast.AST) -> str:
    if isinstance(part, ast.Name):
        return part.id
    return "None" if isinstance(part, ast.Constant) and part.value is None else ""


def _default(value: ast.expr | None) -> str:
    """Return the default of a field if it is a number, text or null, else ""."""
    if isinstance(value, ast.Call):
        value = next((k.value for k in value.keywords if k.arg == "default"), None)
    if isinstance(value, ast.Constant) and value.value != "":
        return format_value(value.value)
    return ""
