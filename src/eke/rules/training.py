"""Rules about batch, training length, schedule, fine-tuning, loader and files."""

import os
import shutil
from pathlib import Path
from typing import Any

from eke.common.errors import Fix
from eke.common.paths import user_path
from eke.common.text import closest_path, override, suggest_match
from eke.config.schema import DEFAULT_PER_DEVICE, SGD, Compute, Config, Text
from eke.hardware import usable_cores
from eke.models.sizes import STAGE
from eke.plan.fine_tuning_defaults import SAMPLES, SET_BY, fine_tuning_defaults
from eke.plan.planner.samples import batch_of, plan_batch
from eke.plan.record.metrics import evaluation_metrics
from eke.rules.rule import Rule, RuleInputs, configured, if_changed, unsafe, without_effect


def _step_samples(facts: RuleInputs) -> int:
    """Return the samples of one forward pass over all devices."""
    return facts.config.batch.micro_batch * facts.distributed.num_processes


def _multiple_of(facts: RuleInputs) -> str:
    """Return a clause about the required divisor of a target."""
    batch, processes = facts.config.batch, facts.distributed.num_processes
    if batch.per_device is None:
        return f"batch=auto needs a multiple of the {processes} processes"
    return (
        f"is not a multiple of batch.per_device x processes = {batch.per_device} x {processes} = "
        f"{_step_samples(facts)}"
    )


def _meant_metric(config: Config) -> str:
    """Return the metric nearest to the configured name."""
    # HF's names begin with `eval_`, those of trackers with `eval/`.
    typed = (config.train.keep_best or "").replace("/", "_").removeprefix("eval_")
    return suggest_match(typed, evaluation_metrics(config)) or "loss"


def _text_path(facts: RuleInputs) -> Path | None:
    data = facts.data
    return user_path(data.path) if isinstance(data, Text) else None


def existing_parent(path: Path) -> Path:
    """Return the nearest existing folder, file or link (even broken) at or above `path`."""
    path = path.absolute()
    while not os.path.lexists(path):  # unlike Path.exists, False for an overlong name
        path = path.parent
    return path


def _runs_reason(facts: RuleInputs) -> str:
    """Return why runs cannot be written, "" if they can."""
    runs = user_path(facts.config.paths.runs)
    parent = existing_parent(runs)
    if not os.path.exists(parent):
        return f"{parent} is a broken link"
    if not parent.is_dir():
        return f"{parent} is not a folder"
    if overlong := [part for part in runs.parts if len(os.fsencode(part)) > _MAX_NAME_BYTES]:
        return f"{overlong[0][:20]}... is longer than {_MAX_NAME_BYTES} bytes"
    return "" if os.access(parent, os.W_OK | os.X_OK) else f"{parent} is not writable"


_MAX_NAME_BYTES = 255
"""Maximum length of a file name in bytes: NAME_MAX of Linux (limits.h)."""

MIN_FREE_BYTES = 64 * 2**20
"""Minimum free disk space: well above a run's plan, record, metrics and log."""


def _free_bytes(facts: RuleInputs) -> int:
    return shutil.disk_usage(existing_parent(user_path(facts.config.paths.runs))).free


_BATCH = "per_device x accumulation x processes = target"


def _cores_per_process(facts: RuleInputs) -> int:
    return max(1, usable_cores() // facts.distributed.num_processes)


def _needs_norm(facts: RuleInputs) -> str:
    """Return why the gradient norm is computed anyway, "" if it is not."""
    config = facts.config
    if config.train.max_grad_norm is not None:
        return f"train.max_grad_norm = {config.train.max_grad_norm} needs the gradient norm"
    if config.distributed.option in STAGE:
        return f"DeepSpeed always computes the norm (distributed = {config.distributed.option})"
    if config.precision.compute is Compute.float16:
        return "float16 needs the gradient norm to detect overflow"
    return ""


def _keep_samples_per_step(facts: RuleInputs) -> Fix:
    """Return the same number of samples per step, with the default micro-batch."""
    config = facts.config
    times = DEFAULT_PER_DEVICE * (config.batch.accumulation or 1)
    target = config.batch.target or times * config.distributed.num_processes
    return Fix("batch.accumulation=null", f"batch.target={target}")


def _usual_rule(key: str) -> Rule:
    def value(facts: RuleInputs) -> Any:
        batch = plan_batch(facts.config, [])
        return batch.samples_per_step if key == SAMPLES else configured(facts.config, key)

    def is_far_off(facts: RuleInputs) -> bool:
        usual = fine_tuning_defaults(facts.config).get(key)
        if usual is None or value(facts) is None or not any(map(facts.is_set, SET_BY[key])):
            return False
        return not usual.low / _FAR_OFF <= value(facts) <= usual.high * _FAR_OFF

    def why(facts: RuleInputs) -> str:
        usual = fine_tuning_defaults(facts.config)[key]
        span = f"{usual.low:g} to {usual.high:g}"
        return f"is more than {_FAR_OFF} times off the usual range {span} of {usual.source}"

    def fix(facts: RuleInputs) -> Fix:
        instead = fine_tuning_defaults(facts.config)[key].value
        if key == SAMPLES:
            return batch_of(facts.config, plan_batch(facts.config, []), int(instead))
        return Fix(f"{key}={instead:g}")

    return unsafe(
        key="batch" if key == SAMPLES else key,
        when=is_far_off,
        value=lambda f: f"{value(f):g}{f' {SAMPLES}' if key == SAMPLES else ''}",
        why=why,
        fix=fix,
        source="eke.plan.fine_tuning_defaults: a source for each value",
    )


_BATCH_AUTO = (
    "docs/how-to/forecast.md: batch=auto chooses the micro-batch and keeps the samples per step"
)
_FAR_OFF = 10  # allowed factor above or below the usual values
_LOADER = "https://docs.pytorch.org/docs/stable/data.html"

RULES = dict(
    batch_contradiction=Rule(
        key="batch.target",
        when=lambda f: (
            None not in (f.config.batch.per_device, f.config.batch.target)
            and f.config.batch.accumulation is not None
            and f.config.batch.target != f.config.batch.accumulation * _step_samples(f)
        ),
        why=lambda f: (
            f"is not batch.per_device x batch.accumulation x processes = "
            f"{f.config.batch.micro_batch} x {f.config.batch.accumulation} x "
            f"{f.distributed.num_processes} = "
            f"{_step_samples(f) * (f.config.batch.accumulation or 1)}"
        ),
        fix=Fix("batch.accumulation=null"),
        source=_BATCH,
    ),
    target_is_multiple=Rule(
        key="batch.target",
        when=lambda f: (
            f.config.batch.target
            and f.config.batch.accumulation is None
            and f.config.batch.target % _step_samples(f) != 0
        ),
        why=_multiple_of,
        fix=lambda f: Fix(
            "batch.target="
            f"{max(1, round((f.config.batch.target or 0) / _step_samples(f))) * _step_samples(f)}"
        ),
        source=_BATCH,
    ),
    steps_or_epochs=Rule(
        key="train.epochs",
        when=lambda f: f.config.train.epochs and f.config.train.steps,
        why=lambda f: f"conflicts with train.steps = {f.config.train.steps}",
        fix=Fix("train.steps=null", remark="or train.epochs=null"),
        source="one of the two is derived from the other",
    ),
    warmup_within_run=Rule(
        key="schedule.warmup_steps",
        when=lambda f: (
            f.config.train.steps and (f.config.schedule.warmup_steps or 0) > f.config.train.steps
        ),
        why=lambda f: f"exceeds train.steps = {f.config.train.steps}",
        fix=lambda f: Fix(f"schedule.warmup_steps={(f.config.train.steps or 10) // 10}"),
        source="the peak learning rate would never be reached",
    ),
    early_stop_needs_evaluations=without_effect(
        key="train.early_stop_patience",
        when=lambda f: not f.config.train.eval_every,
        why="train.eval_every is null. The only evaluation follows the last step",
        fix=Fix("train.eval_every=50"),
        source="eke.training.loop.evaluation",
    ),
    keep_best_is_a_metric=if_changed(
        key="train.keep_best",
        when=lambda f: (
            (typed := f.config.train.keep_best) not in evaluation_metrics(f.config)
            and (typed or "").partition("/")[0] not in f.config.metrics
        ),
        why=lambda f: (
            f"no metric of task={f.config.task.option}. Metrics: "
            f"{', '.join(evaluation_metrics(f.config))}"
        ),
        fix=lambda f: Fix(f"train.keep_best={_meant_metric(f.config)}"),
        source="eke.plan.record.metrics",
    ),
    keep_best_needs_evaluations=without_effect(
        key="train.keep_best",
        when=lambda f: not f.config.train.eval_every,
        why="train.eval_every is null. There is only the final evaluation",
        fix=Fix("train.eval_every=50"),
        source="eke.training.loop.evaluation",
    ),
    nesterov_needs_momentum=if_changed(
        key="optimizer.nesterov",
        when=lambda f: isinstance(f.config.optimizer, SGD) and f.config.optimizer.momentum == 0,
        why="needs momentum. optimizer.momentum = 0",
        fix=Fix("optimizer.momentum=0.9"),
        source="https://docs.pytorch.org/docs/stable/generated/torch.optim.SGD.html",
    ),
    norm_is_known_anyway=without_effect(
        key="train.record_grad_norm",
        when=lambda f: _needs_norm(f),
        why=_needs_norm,
        fix=lambda f: (
            Fix("train.record_grad_norm=true")
            if f.config.train.max_grad_norm is None
            else Fix("train.max_grad_norm=null", remark="or train.record_grad_norm=true")
        ),
        source="https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grad_norm_.html",
    ),
    too_short_to_time=without_effect(
        key="train.steps",
        when=lambda f: (
            f.config.train.steps and f.config.train.steps <= f.config.train.timing_warmup_steps
        ),
        why=lambda f: (
            f"all steps are warm-up (train.timing_warmup_steps = "
            f"{f.config.train.timing_warmup_steps})"
        ),
        fix=lambda f: Fix(f"train.steps={f.config.train.timing_warmup_steps + 20}"),
        source="notes/measuring.md: no timing includes warm-up steps",
    ),
    persistent_needs_workers=Rule(
        key="dataloader.persistent",
        when=lambda f: f.config.dataloader.persistent and f.config.dataloader.workers == 0,
        why="needs loader processes. dataloader.workers = 0",
        source=_LOADER,
    ),
    stop_keeps_nothing=unsafe(
        key="train.save_on_signal",
        when=lambda f: (
            (t := f.config.train).save_final
            and not (t.save_on_signal or t.checkpoint_every or t.keep_best)
        ),
        why="a stopped or requeued run starts again at step 0: train.checkpoint_every = null",
        source="src/eke/training/loop/loop.py",
    ),
    prefetch_needs_workers=Rule(
        key="dataloader.prefetch",
        when=lambda f: f.config.dataloader.prefetch and f.config.dataloader.workers == 0,
        why="needs loader processes. dataloader.workers = 0",
        fix=Fix("dataloader.workers=2"),
        source=_LOADER,
    ),
    more_workers_than_cores=unsafe(
        key="dataloader.workers",
        when=lambda f: f.config.dataloader.workers > _cores_per_process(f),
        why=lambda f: f"exceeds the {_cores_per_process(f)} cores of each training process",
        fix=lambda f: Fix(f"dataloader.workers={_cores_per_process(f)}"),
        source=_LOADER,
    ),
    text_exists=Rule(
        key="data.path",
        when=lambda f: (p := _text_path(f)) and not os.path.exists(p),
        value=_text_path,
        why="no such file or folder",
        fix=lambda f: Fix(
            override("data.path", str(closest_path(_text_path(f) or Path()) or "FILE_OR_FOLDER"))
        ),
        source="the file system",
    ),
    text_readable=Rule(
        key="data.path",
        when=lambda f: (p := _text_path(f)) and os.path.exists(p) and not os.access(p, os.R_OK),
        value=_text_path,
        why="is not readable",
        fix=Fix("data.path=FILE_OR_FOLDER"),
        source="the file system",
    ),
    runs_writable=Rule(
        key="paths.runs",
        when=lambda f: not f.planning and _runs_reason(f),
        why=_runs_reason,
        source="the file system",
    ),
    runs_has_space=Rule(
        key="paths.runs",
        when=lambda f: not f.planning and not _runs_reason(f) and _free_bytes(f) < MIN_FREE_BYTES,
        why=lambda f: (
            f"the disk has {_free_bytes(f) // 2**20} MiB free. A run needs up to "
            f"{MIN_FREE_BYTES // 2**20} MiB without checkpoints"
        ),
        fix=Fix("paths.runs=FOLDER_ON_ANOTHER_DISK"),
        source="the file system",
        passing=True,
    ),
    **{f"{k.rpartition('.')[2].replace(' ', '_')}_far_off": _usual_rule(k) for k in SET_BY},
    auto_chooses_micro_batch=Rule(
        key="batch.per_device",
        when=lambda f: f.config.batch.option == "auto" and f.config.batch.per_device,
        why="conflicts with batch=auto, which chooses this value",
        fix=Fix("batch=fixed", remark="or batch.per_device=null, and batch=auto chooses"),
        source=_BATCH_AUTO,
    ),
    auto_derives_accumulation=Rule(
        key="batch.accumulation",
        when=lambda f: not f.config.batch.per_device and f.config.batch.accumulation,
        why="conflicts with batch=auto, which keeps batch.target (samples per step)",
        fix=_keep_samples_per_step,
        source=_BATCH_AUTO,
    ),
)
