"""The second half of an optimizer step, parameter groups, and the learning rate of a step.

Sharding and offloading bring their own `Update`; the loop knows only this interface.
"""

import re
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from eke.config.schema import FSDP
from eke.models.families import Role
from eke.plan.planner import Plan
from eke.training.model.checkpointing import find_layers
from eke.training.part_files import Held


class Update(Protocol):
    """How one optimizer step is taken; by default of a process that has it all."""

    even: bool = False
    """Every forward pass talks to the other ranks, so that all need the same number of them."""

    def exchange(self, last: bool) -> AbstractContextManager[None]:
        """Context of one micro-batch: ranks exchange gradients in the last one of a step."""
        return nullcontext()

    def backward(self, loss: Tensor, num_targets: int) -> None:
        """Add the gradients of the scalar `loss`, divided by the targets of the whole step."""

    def apply(self) -> Tensor | None:
        """Clip, step and forget the gradients; returns their norm before clipping, on the device.

        The norm is that of the whole model over all ranks; None if not requested. The optimizer's
        groups have had their learning rate since before the first micro-batch.
        """

    def hold(self, model: nn.Module) -> Held | None:
        """What this rank writes of a checkpoint in parts; None if it has all. A collective."""
        return None

    def held(self) -> list[Tensor]:
        """Tensors of this rank that belong neither to the model nor to the optimizer's state."""
        return []


class PlainUpdate(Update):
    """Every rank has all weights, and a torch optimizer over them: one process, or ddp."""

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
        # torch's fused kernels divide by `grad_scale` as they read gradients, for GradScaler:
        # clipping so spares a pass. None accepts FSDP2's DTensors with a plain scale.
        cut = plan.batch.world_size > 1 and isinstance(plan.config.distributed, FSDP)
        divides = getattr(optimizer, "_step_supports_amp_scaling", False)
        self.clips_in_step = scaler is None and divides and not cut

    def exchange(self, last: bool) -> AbstractContextManager[None]:
        """Gradients of the earlier micro-batches only add up."""
        if last or self.world_size == 1:
            return nullcontext()
        # A forecast traces one of several processes, whose model nothing wraps.
        apart: AbstractContextManager[None] = getattr(self.model, "no_sync", nullcontext)()
        return apart

    def backward(self, loss: Tensor, num_targets: int) -> None:
        """Ranks average their gradients where they should sum them, hence the factor."""
        # Not Accelerate's: it divides by its accumulation steps, also where there is one.
        scaled = self.scaler.scale(loss) if self.scaler else loss
        scaled.backward(torch.full_like(scaled, self.world_size / num_targets))  # type: ignore[no-untyped-call]  # torch 2.13

    def apply(self) -> Tensor | None:
        """One step of the optimizer."""
        norm = self.clip()
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def clip(self) -> Tensor | None:
        """Global gradient norm before clipping; clips if requested."""
        if not self.knows_norm:
            return None
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        norm = norm_in_float32([p.grad for p in self.parameters if p.grad is not None])
        if self.max_grad_norm is None:
            return norm
        if self.clips_in_step:
            divisor = ((norm + CLIP_EPS) / self.max_grad_norm).clamp(min=1.0)
            self.optimizer.grad_scale = divisor  # type: ignore[attr-defined]  # torch 2.13
        else:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.max_grad_norm, norm)
        return norm


CLIP_EPS = 1e-6
"""Added to the norm before it divides: torch.nn.utils.clip_grads_with_norm_'s."""


def norm_in_float32(gradients: list[Tensor]) -> Tensor:
    """Norm of gradients of any format as one vector; a scalar.

    torch 2.13's `get_total_norm` answers in the gradients' format (two to three digits in
    bfloat16), and sorts them by device and format in every step.
    """
    # On a GPU a few kernels for all of them, where a norm for each is a launch for each.
    norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


class InBackwardUpdate(Update):
    """Each weight is updated as soon as its gradient is whole, and the gradient freed.

    Lv et al. 2023 (LOMO), arXiv:2306.09782, section 3.1. A hook steps the one optimizer with its
    groups narrowed to a single weight: its state is that of an ordinary run. A gradient is whole
    after one backward pass, hence the rules in rules/memory.py.
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
            hook: Any = parameter.register_post_accumulate_grad_hook  # torch 2.13: no annotations
            hook(self._step)

    def backward(self, loss: Tensor, num_targets: int) -> None:
        """Gradients come into being, update their weights and go."""
        loss.backward(torch.full_like(loss, 1 / num_targets))  # type: ignore[no-untyped-call]  # torch 2.13

    def apply(self) -> Tensor | None:
        """Only the norm is left: of the gradients there were, in the order of the weights."""
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
            # Of bfloat16 gradients, too, in float32: rounded norms are no norm of the whole.
            self._norms[parameter] = torch.linalg.vector_norm(parameter.grad, dtype=torch.float32)
        # The optimizer knows this weight alone: searching all for each would take n^2 looks.
        groups = self.optimizer.param_groups
        group = groups[self._group_of[parameter]]
        self.optimizer.param_groups = [{**group, "params": [parameter]}]
        try:
            self.optimizer.step()
        finally:
            self.optimizer.param_groups = groups
        parameter.grad = None


Groups = list[dict[str, Any]]
"""As torch's optimizers take them, each with `role`: the value of a `Role`, a plain string so that
it can lie in a checkpoint."""


_SHIFT_OR_SCALE = re.compile(r"(^|_)(bias(es)?|beta|gamma|gain|norm|scales?)(_|$)")


def _shifts_or_scales(own: str, module: nn.Module, name: str) -> bool:
    """Return whether a module's parameter is a bias, gain or normalisation weight of any shape.

    gpt_oss has a bias for each expert and Cohere a gain for each head. `own` names the module.
    """
    # A projection or a table inside a normalisation is one all the same.
    kind = "" if isinstance(module, nn.Linear | nn.Embedding) else f"{own} {type(module).__name__}"
    return bool(_SHIFT_OR_SCALE.search(name) or re.search("norm(?!al)|^ia3_l ", kind.lower()))


def parameter_groups(model: nn.Module, weight_decay: float) -> Groups:
    """A group per role that occurs of the trained parameters; vectors are not decayed."""
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
    """Groups of this role, and the others."""
    inside = [group for group in groups if group.get("role") == role.value]
    return inside, [group for group in groups if group.get("role") != role.value]


RATIO = "lr_ratio"
"""Key of a parameter group: its learning rate as a multiple of the optimizer's."""


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    """Give each group its rate: in place where it is a tensor, which compiled steps have read."""
    for group in optimizer.param_groups:
        rate = learning_rate * group.get(RATIO, 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
