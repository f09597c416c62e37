"""Updates of an optimizer step, parameter groups, and the learning rate of a step."""

import re
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from eke.models.families import Role
from eke.plan.planner import Plan
from eke.training.model.checkpointing import find_layers
from eke.training.part_files import Held


class Update(Protocol):
    """Interface of an optimizer step. Sharding and offloading have their own."""

    even: bool = False
    """True if all ranks need the same number of forward passes, because each communicates."""

    def exchange(self, last: bool) -> AbstractContextManager[None]:
        """Return the context of a micro-batch. Ranks exchange gradients in the last of a step."""
        return nullcontext()

    def backward(self, loss: Tensor, num_targets: float) -> None:
        """Add the gradients of the scalar `loss`, divided by the targets of the entire step."""

    def apply(self) -> Tensor | None:
        """Clip, step and clear gradients, and return their global norm, None if not needed."""

    def hold(self, model: nn.Module) -> Held | None:
        """Return this rank's part of a sharded checkpoint, None if it has all. Collective."""
        return None

    def held(self) -> list[Tensor]:
        """Return tensors of this rank outside the model and the optimizer's state."""
        return []


class PlainUpdate(Update):
    """Update with all weights and a torch optimizer on each rank: one process, or ddp."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None,
        parameters: list[nn.Parameter],
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.scaler = scaler
        self.parameters = parameters
        self.world_size = plan.batch.world_size
        self.max_grad_norm = plan.config.train.max_grad_norm
        needed = self.max_grad_norm is not None or scaler is not None
        self.knows_norm = needed or plan.config.train.record_grad_norm
        # torch's fused kernels divide gradients by `grad_scale`, made for GradScaler. Clipping by
        # it saves a pass. The kernels do not accept FSDP2's DTensors with a plain scale.
        cut = plan.batch.world_size > 1 and plan.ranks.fsdp is not None
        divides = getattr(optimizer, "_step_supports_amp_scaling", False)
        self.clips_in_step = scaler is None and divides and not cut

    def exchange(self, last: bool) -> AbstractContextManager[None]:
        """Return a context that only accumulates gradients before the last micro-batch."""
        if last or self.world_size == 1:
            return nullcontext()
        # A memory forecast traces one of several processes, without a wrapped model.
        apart: AbstractContextManager[None] = getattr(self.model, "no_sync", nullcontext)()
        return apart

    def backward(self, loss: Tensor, num_targets: float) -> None:
        """Add the gradients of the loss."""
        # Not Accelerate's backward, which divides by its accumulation steps. The factor compensates
        # for ranks that average gradients instead of summing them.
        scaled = self.scaler.scale(loss) if self.scaler else loss
        scaled.backward(torch.full_like(scaled, self.world_size / num_targets))  # type: ignore[no-untyped-call]  # torch 2.13

    def apply(self) -> Tensor | None:
        """Clip, step the optimizer, clear gradients and return the norm."""
        norm = self.clip()
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def clip(self) -> Tensor | None:
        """Return the global gradient norm before clipping, and clip if requested."""
        if not self.knows_norm:
            return None
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        norm = norm_in_float32([p.grad for p in self.parameters if p.grad is not None])
        if self.max_grad_norm is None:
            return norm
        if self.clips_in_step:
            divisor = ((norm + _CLIP_EPS) / self.max_grad_norm).clamp(min=1.0)
            self.optimizer.grad_scale = divisor  # type: ignore[attr-defined]  # torch 2.13
        else:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.max_grad_norm, norm)
        return norm


_CLIP_EPS = 1e-6
"""Term added to the norm before division, as in torch.nn.utils.clip_grads_with_norm_."""


def norm_in_float32(gradients: list[Tensor]) -> Tensor:
    """Return the norm of all gradients as one vector, a float32 scalar."""
    # torch 2.13's `get_total_norm` returns the gradients' format (two to three digits in bfloat16).
    # A few kernels on a GPU, instead of one launch per gradient.
    norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


class InBackwardUpdate(Update):
    """Update of each weight in the backward pass, as soon as its gradient is complete.

    The gradient is freed immediately (LOMO: Lv et al. 2023, arXiv:2306.09782, section 3.1). A hook
    steps the optimizer on one weight. Gradients need a single backward pass (rules/memory.py).
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], knows_norm: bool
    ) -> None:
        self.knows_norm = knows_norm
        self.optimizer = optimizer
        self.parameters = parameters
        self._norms: dict[nn.Parameter, Tensor] = {}
        numbered = enumerate(optimizer.param_groups)
        self._group_of = {p: number for number, group in numbered for p in group["params"]}
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._step)  # type: ignore[no-untyped-call]  # torch 2.13

    def backward(self, loss: Tensor, num_targets: float) -> None:
        """Compute gradients, which update their weights and are freed."""
        loss.backward(torch.full_like(loss, 1 / num_targets))  # type: ignore[no-untyped-call]  # torch 2.13

    def apply(self) -> Tensor | None:
        """Return the norm of the gradients of this step, in the order of the weights."""
        if not self.knows_norm:
            return None
        norms = [self._norms[p] for p in self.parameters if p in self._norms]
        self._norms = {}
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())

    def _step(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        if parameter.grad is None:
            return
        if self.knows_norm:
            # float32 also for bfloat16 gradients: rounded norms would give a wrong total.
            self._norms[parameter] = torch.linalg.vector_norm(parameter.grad, dtype=torch.float32)
        # Give the optimizer only this weight. Searching all for each weight would take n^2 steps.
        groups = self.optimizer.param_groups
        group = groups[self._group_of[parameter]]
        self.optimizer.param_groups = [{**group, "params": [parameter]}]
        try:
            self.optimizer.step()
        finally:
            self.optimizer.param_groups = groups
        parameter.grad = None


Groups = list[dict[str, Any]]
"""Parameter groups of torch's optimizers, each with `role`: the value of a `Role`, as a string."""


_SHIFT_OR_SCALE = re.compile(r"(^|_)(bias(es)?|beta|gamma|gain|norm|scales?)(_|$)")


def _shifts_or_scales(own: str, module: nn.Module, name: str) -> bool:
    """Return whether a module's parameter is a bias, gain or normalisation weight of any shape."""
    # A projection or table inside a normalisation keeps its own role.
    kind = "" if isinstance(module, nn.Linear | nn.Embedding) else f"{own} {type(module).__name__}"
    return bool(_SHIFT_OR_SCALE.search(name) or re.search("norm(?!al)|^ia3_l ", kind.lower()))


def parameter_groups(model: nn.Module, weight_decay: float) -> Groups:
    """Return a group of trained parameters per role. Vectors have no weight decay."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    vectors = {
        id(p)
        for path, module in model.named_modules()
        for name, p in module.named_parameters(recurse=False)
        if p.dim() < 2 or _shifts_or_scales(path.rpartition(".")[2], module, name)
    }
    layered = {id(p) for layer in find_layers(model) for p in layer.parameters()}

    def role_of(parameter: nn.Parameter) -> Role:
        if id(parameter) in vectors:
            return Role.vector
        if id(parameter) in tables:
            return Role.embedding
        is_matrix = parameter.dim() == 2
        return Role.hidden if is_matrix and id(parameter) in layered else Role.outer

    found: dict[Role, list[nn.Parameter]] = {role: [] for role in Role}
    for parameter in model.parameters():
        if parameter.requires_grad:
            found[role_of(parameter)].append(parameter)
    decays = {role: 0.0 if role is Role.vector else weight_decay for role in Role}
    return [
        {"params": parameters, "weight_decay": decays[role], "role": role.value}
        for role, parameters in found.items()
        if parameters
    ]


def split(groups: Groups, role: Role) -> tuple[Groups, Groups]:
    """Return the groups of this role, and the other groups."""
    inside = [group for group in groups if group.get("role") == role.value]
    return inside, [group for group in groups if group.get("role") != role.value]


RATIO = "lr_ratio"
"""Key of a parameter group: its learning rate as a multiple of the optimizer's."""


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    """Set each group's learning rate, in place if it is a tensor that compiled steps read."""
    for group in optimizer.param_groups:
        rate = learning_rate * group.get(RATIO, 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
