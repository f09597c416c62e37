"""Optimizers that keep their states in a subspace: GaLore (galore-torch 1.0), APOLLO (1.0.3)."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from eke.config.schema import Apollo, GaLore
from eke.models.sizes import Role, projection_rank
from eke.plan.planner import Plan
from eke.training.optimizer.groups import Groups, split

PROJECTOR = "projector"
"""Key of a parameter's state under which both libraries keep an object with a matrix in it."""


def galore(plan: Plan, groups: Groups) -> Optimizer:
    """AdamW in a subspace found by singular value decomposition, for matrices inside layers."""
    from galore_torch import GaLoreAdamW
    from galore_torch.galore_projector import GaLoreProjector

    config = plan.config.optimizer
    assert isinstance(config, GaLore)
    projection = {
        "rank": projection_rank(plan.config),
        "update_proj_gap": config.update_proj_gap,
        "scale": config.scale,
        "proj_type": "std",
    }
    optimizer: Optimizer = GaLoreAdamW(
        _projected(groups, projection),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        no_deprecation_warning=True,
    )
    save_projectors_as_data(optimizer, GaLoreProjector)
    return optimizer


def apollo(plan: Plan, groups: Groups) -> Optimizer:
    """SGD with the scaling of a randomly projected AdamW, for matrices inside layers."""
    from apollo_torch import APOLLOAdamW
    from apollo_torch.random_projector import GradientProjector

    config = plan.config.optimizer
    assert isinstance(config, Apollo)
    projection = {
        "rank": projection_rank(plan.config),
        "update_proj_gap": config.update_proj_gap,
        "scale": config.scale,
        "scale_type": config.scale_type.value,
        "proj": "random",
        "proj_type": "std",
    }
    optimizer: Optimizer = APOLLOAdamW(
        _projected(groups, projection),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
    )
    save_projectors_as_data(optimizer, GradientProjector)
    return optimizer


def _projected(groups: Groups, projection: dict[str, Any]) -> Groups:
    """The libraries project every group that has a rank."""
    hidden, rest = split(groups, Role.hidden)
    return [*({**group, **projection} for group in hidden), *rest]


def save_projectors_as_data(optimizer: Optimizer, projector: type) -> None:
    """Keep the libraries' objects out of `state_dict`: a checkpoint is loaded with `weights_only`.

    Args:
        optimizer: of galore-torch or apollo-torch.
        projector: class of the objects in its states; all it needs are its attributes.
    """

    def to_data(_: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        return _with_projectors(saved, lambda found: dict(vars(found)))

    def to_objects(_: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
        def make(attributes: dict[str, Any]) -> Any:
            made: Any = object.__new__(projector)
            vars(made).update(attributes)
            return made

        # Before torch looks at it: it takes the strings inside apart, being iterable.
        return _with_projectors(loaded, make)

    def to_device(restored: Optimizer) -> None:
        for parameter, state in restored.state.items():
            if PROJECTOR in state:
                found = state[PROJECTOR]
                found.ortho_matrix = found.ortho_matrix.to(parameter.device)

    optimizer.register_state_dict_post_hook(to_data)
    optimizer.register_load_state_dict_pre_hook(to_objects)
    optimizer.register_load_state_dict_post_hook(to_device)


def _with_projectors(saved: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """A state dict with its projectors changed; the one given stays as it is."""
    states = {
        key: {name: change(value) if name == PROJECTOR else value for name, value in state.items()}
        for key, state in saved["state"].items()
    }
    return {**saved, "state": states}


def projected_parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    """Parameters whose states are in a subspace."""
    return [p for p, state in optimizer.state.items() if PROJECTOR in state]
