"""Groups of parameters: by what a parameter is, so that optimizers can treat kinds differently."""

from typing import Any

from torch import nn

from eke.models.sizes import Role
from eke.training.model.checkpointing import find_layers

Groups = list[dict[str, Any]]
"""As torch's optimizers take them, each with `role`: the value of a `Role`, a plain string so that
it can lie in a checkpoint."""


def parameter_groups(model: nn.Module, weight_decay: float) -> Groups:
    """A group per role that occurs; biases and normalisation weights, the vectors, are not decayed.

    Args:
        model: its trainable parameters are grouped; with its Transformer layers, not wrapped yet.
        weight_decay: of everything of two or more dimensions.
    """
    roles = _roles(model)
    groups: Groups = [
        {
            "params": [p for p, found in roles if found is role],
            "weight_decay": 0.0 if role is Role.vector else weight_decay,
            "role": role.value,
        }
        for role in Role
    ]
    return [group for group in groups if group["params"]]


def split(groups: Groups, *roles: Role) -> tuple[Groups, Groups]:
    """Groups of these roles, and the others."""
    names = {role.value for role in roles}
    inside = [group for group in groups if group.get("role") in names]
    return inside, [group for group in groups if group.get("role") not in names]


def _roles(model: nn.Module) -> list[tuple[nn.Parameter, Role]]:
    """Each trainable parameter once, in the model's order, with its role."""
    tables = {
        id(p)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for p in module.parameters(recurse=False)
    }
    # IA3's scales have two dimensions and multiply like a vector: decay would move them from 1.
    scales = {id(p) for name, p in model.named_parameters() if ".ia3_l." in name}
    layered = {id(p) for layer in find_layers(model) for p in layer.parameters()}

    def role(parameter: nn.Parameter) -> Role:
        if parameter.dim() < 2 or id(parameter) in scales:
            return Role.vector
        if id(parameter) in tables:
            return Role.embedding
        is_matrix = parameter.dim() == 2
        return Role.hidden if is_matrix and id(parameter) in layered else Role.outer

    return [(p, role(p)) for p in model.parameters() if p.requires_grad]
