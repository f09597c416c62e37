"""Models and schedules of own code, and models on disk."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from safetensors.torch import save_model
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from eke.common.errors import RunError
from eke.common.files import write_json
from eke.config.parts import Part
from eke.config.schema import CustomModel
from eke.plan.own_code import call_part, load_part
from eke.plan.planner import Plan
from eke.training.custom import (
    Origin,
    bind_part,
    find_part,
    origin_of,
    parameters_of,
    refuse,
    set_origin,
    takes_any,
)
from eke.training.custom.samples import kept_random, seed_all
from eke.training.distributed.parts import Parts
from eke.training.model.number_formats import base_dtype

_CONFIG, _WEIGHTS = "config.json", "model.safetensors"


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move each parameter to the meta device when a module registers it. Buffers keep data."""
    # Not `torch.device("meta")`: constructors compute with numbers of other tensors, for example
    # rates by `linspace(...).item()`.
    register = nn.Module.register_parameter

    def moved(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:  # else shared weights are two
            data = torch.empty_like(parameter.detach(), device="meta")
            parameter = nn.Parameter(data, parameter.requires_grad)
        register(module, name, parameter)

    with patch.object(nn.Module, "register_parameter", moved):
        yield


def build_own_model(plan: Plan, device: torch.device, parts: Parts | None = None) -> nn.Module:
    """Build the model of own code on `device`, with weights drawn on the host from the seed.

    With `parts`, each rank draws all weights and keeps its rows. RunError: It is no module.
    """
    part = cast(Part, find_part(plan.config, "model"))
    on_meta = device.type == "meta"
    with kept_random(), torch.device("cpu"), _parameters_on_meta() if on_meta else nullcontext():
        seed_all(plan.config.seed)
        torch.default_generator.manual_seed(plan.config.seed)
        made = call_part(part)
    if not isinstance(made, nn.Module):
        raise refuse(part, f"returned {type(made).__name__}, not an nn.Module")
    if hasattr(made, "training_step"):
        why = f"{type(made).__name__} is a LightningModule, whose steps eke does not call"
        raise refuse(part, why, "the plain module inside")
    if not any(p.requires_grad for p in made.parameters()):
        raise refuse(part, "the model has no trainable parameters")
    layers = cast(CustomModel, plan.config.model).layers
    classes = sorted({type(module).__name__ for module in made.modules()})
    for name in layers or ():
        if name not in classes:
            known = ", ".join(classes)
            raise RunError(f"model.layers: {name} is no class of its modules: {known}")
    model: nn.Module = made.to(base_dtype(plan))
    if parts:
        parts.adopt(model)
    elif not on_meta:
        model = model.to(device)
    from transformers import PreTrainedModel

    settings: dict[str, Any] | None = dict(part.args)
    target = load_part(part)
    if not takes_any(parameters_of(target)):  # PyTorchModelHubMixin passes known names only
        settings = {"target": part.target, **part.args}
    if isinstance(model, PreTrainedModel):
        settings = None
    set_origin(model, Origin(settings, layers))
    return model


def save_own_model(model: nn.Module, folder: Path, with_weights: bool) -> None:
    """Write config.json and weights as PyTorchModelHubMixin reads them, shared tensors once."""
    origin = origin_of(model)
    assert origin is not None, "is_plain(model) was true"
    write_json(folder / _CONFIG, cast(dict[str, Any], origin.settings))
    if with_weights:
        save_model(model, str(folder / _WEIGHTS), metadata={"format": "pt"})


def build_own_schedule(plan: Plan) -> Callable[[int], float]:
    """Return the schedule of own code, from the step to a multiplier of the peak."""
    part, total = cast(Part, find_part(plan.config, "schedule")), plan.steps.total
    target = load_part(part)
    if isinstance(target, type) and issubclass(target, LRScheduler):
        why = (
            "a scheduler of torch keeps state. eke computes the rate from the step when it resumes"
        )
        raise refuse(part, why, "a function of step and total_steps that returns a multiplier")
    function = bind_part(part)

    def multiplier(step: int) -> float:
        value = float(function(step, total))
        if not value >= 0:
            raise RunError(f"schedule.target = {part.target}: returned {value} for step {step}")
        return value

    return multiplier
