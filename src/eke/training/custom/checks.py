"""Checks of own code before the first step: micro-batches must not change the mathematics."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from eke.common.errors import ConfigError, Fix, Problem
from eke.config.schema import CustomModel
from eke.training.batches.batches import MicroBatch
from eke.training.custom.outputs import build_count, has_own_loss
from eke.training.loop.meter import capture_random_state, restore_random_state

if TYPE_CHECKING:
    from eke.training.loop.training_state import TrainingState

_TOLERANCE, _TOLERANCE_16_BITS = 1e-4, 1e-2
"""Largest difference of losses."""


def check_division(job: "TrainingState") -> None:
    """Compare the loss of a micro-batch with the losses of its parts, in eval mode. Collective.

    ConfigError: They differ, and a step has several micro-batches.
    """
    plan, loss = job.plan, job.plan.config.loss
    own_loss = has_own_loss(plan)
    if not (own_loss or isinstance(plan.config.model, CustomModel)):
        return
    keys = next(job.data.order().steps(0, 1))[: plan.batch.per_device]
    batch = job.transfer(job.data.collate([job.data.train[key] for key in keys]))  # type: ignore[misc]  # any samples
    rows, random = batch.num_samples, capture_random_state()
    places = [slice(0, rows)]
    for cut in (max(1, rows // 2), 1):  # halves can agree by chance
        places += [slice(0, cut), slice(min(cut, rows - 1), rows)]
    job.model.eval()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), job.formats.eval_autocast():
        found = [_measure(job, _rows(batch, place)) for place in places]
    job.model.train()
    restore_random_state(random)
    is_cut = (
        plan.batch.samples_per_step > plan.batch.per_device or plan.config.batch.option == "auto"
    )
    if not is_cut or loss.couples_batch or rows < 2 or batch.tensors[0].shape[0] != rows:
        return
    norms = [m for m in job.bare_model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    narrow = torch.finfo(getattr(torch, plan.compute.matmul)).bits == 16
    limit = _TOLERANCE_16_BITS if narrow else _TOLERANCE
    means, counts = [mean for mean, _ in found], [held for _, held in found]
    differs = _difference(means, [held["count"] for held in counts]) > limit
    if not (differs or norms):
        return
    why = f"the loss of a micro-batch is {means[0]:.6g}, of its halves {means[1]:.6g} and "
    why += f"{means[2]:.6g}"
    for key in counts[0] if own_loss and not norms else ():
        if key != "count" and _difference(means, [held[key] for held in counts]) <= limit:
            why += f", which are means over {key}"
            raise ConfigError(Problem("loss.per", str(loss.per or "samples"), why,
                                      Fix(f"loss.per={key}"), "loss_per"))  # fmt: skip
    if norms:
        why = f"{type(norms[0]).__name__} computes with the mean of a micro-batch"
    why += ". The samples of a micro-batch change each other's loss, so its size changes training"
    size = plan.batch.samples_per_step
    alone = "batch.accumulation=1" if plan.batch.accumulation > 1 else "distributed=none"
    alone = f"{alone} batch.per_device={size}" if plan.config.batch.option != "auto" else alone
    remark = f"or {alone}, which keeps the step in one micro-batch"
    fix = Fix("loss.couples_batch=true", remark=remark)
    raise ConfigError(Problem("loss.couples_batch", "false", why, fix, "coupled_samples"))


def _rows(batch: MicroBatch, place: slice) -> MicroBatch:
    """Return some rows of a micro-batch."""
    names = ("inputs", "labels", "sources")
    values = {name: getattr(batch, name) for name in names}
    size = batch.tensors[0].shape[0]
    cut = tree_map_only(Tensor, lambda t: t[place] if t.shape[:1] == (size,) else t, values)
    for key, value in cut["inputs"].items():
        if isinstance(value, list) and len(value) == size:
            cut["inputs"][key] = value[place]
    return replace(batch, **cut, num_samples=len(range(size)[place]), places=None)


def _measure(job: "TrainingState", batch: MicroBatch) -> tuple[float, dict[str, int]]:
    """Return the mean loss, and counts of each batch key that can be its divisor."""
    rows, mapping = batch.num_samples, batch.mapping
    count = build_count(job.plan)(mapping, rows)
    if not has_own_loss(job.plan):
        labels = batch.labels
        count = int((~labels.isnan() if labels.is_floating_point() else labels >= 0).sum())
    total = job.loss(job.bare_model, replace(batch, num_targets=count)).reshape(-1)[0]
    held: dict[str, Any] = {"count": count, "samples": rows}
    if counted := getattr(job.loss, "counts", None):  # a sum with its own count
        held["count"] = counted.pop().item()
    for key, value in mapping.items():
        if isinstance(value, Tensor) and value.dtype is not torch.bool:
            held[key] = int((value >= 0).sum())
    return total.item() / (held["count"] or 1), held


def _difference(means: list[float], counts: list[int]) -> float:
    """Return the largest difference between a mean and the mean of two parts."""
    (whole, _), *parts = zip(means, counts, strict=True)
    found = []
    for (one, first), (two, second) in zip(parts[::2], parts[1::2], strict=True):
        found.append(abs(whole - (one * first + two * second) / max(1, first + second)))
    return max(found)


_Hidden = dict[str, Any]
"""Values of a model that `state_dict()` lacks, by `path.name`."""


def hidden_state(model: nn.Module) -> _Hidden:
    """Return plain attributes, and shape, version and place of tensors that are not saved."""
    saved = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    found: _Hidden = {}
    for path, module in model.named_modules():
        own = {k: v for k, v in vars(module).items() if k not in _OF_TORCH}
        for name, value in {**own, **module._buffers}.items():
            key = f"{path or type(module).__name__}.{name}"
            if isinstance(value, int | float | str | tuple):
                found[key] = value
            elif isinstance(value, Tensor) and id(value) not in saved:
                found[key] = [*value.shape], value._version, value.data_ptr()
    return found


_OF_TORCH = frozenset(vars(nn.Module()))


def check_hidden_state(job: "TrainingState", before: _Hidden) -> None:
    """Compare `hidden_state` after a step. ConfigError: A checkpoint would lack what changed."""
    settings = job.plan.config.train
    after = hidden_state(job.bare_model)
    changed = [
        key for key, value in before.items()
        if key in after and after[key] != value and type(after[key]) is type(value)
        and (not isinstance(value, tuple) or after[key][:1] == value[:1])
    ]  # fmt: skip
    if not changed or not (settings.checkpoint_every or settings.save_on_signal):
        return
    shown = [f"{key}: {before[key]} -> {after[key]}" for key in changed]
    shown = [text if "[" not in text else key for key, text in zip(changed, shown, strict=True)]
    why = (
        f"changed in a step and is not in state_dict(): {', '.join(shown)}. A resumed run lacks it"
    )
    fix = Fix("train.checkpoint_every=null train.save_on_signal=false", remark="or register_buffer")
    target: str = cast(CustomModel, job.plan.config.model).target
    raise ConfigError(Problem("model.target", target, why, fix, "hidden_state"))
