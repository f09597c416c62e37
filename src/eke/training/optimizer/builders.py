"""Builders of the optimizers: plan and parameter groups -> torch optimizer.

Tested: schedulefree 1.4, torchao 0.18 (both compile the step at first use), galore-torch 1.0,
apollo-torch 1.0.3, bitsandbytes 0.50.
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pkgutil import resolve_name
from typing import Any, cast

import torch
from torch.optim import Optimizer

from eke.common.errors import RunError
from eke.config import schema
from eke.config.parts import Part
from eke.models.families import Role
from eke.models.sizes import PAGED_MIN_SIZE, optimizer_entry, projection_rank
from eke.plan.own_code import call_part
from eke.plan.planner import Plan
from eke.training.custom import find_part, refuse
from eke.training.distributed.build_operators import load_adam
from eke.training.model.model_checks import preserve_rng_state
from eke.training.optimizer.update import RATIO, Groups, split


def custom(plan: Plan, groups: Groups) -> Optimizer:
    """Return the optimizer of own code. RunError: It is no optimizer."""
    part = cast(Part, find_part(plan.config, "optimizer"))
    own = [{k: v for k, v in group.items() if k != "role"} for group in groups]
    made = call_part(part, own, lr=plan.config.optimizer.lr)
    if not isinstance(made, Optimizer):
        raise refuse(part, f"returned {type(made).__name__}, not a torch.optim.Optimizer")
    return made


def _make(name: str, groups: Groups, config: schema.AdamW | schema.Lion, **more: Any) -> Optimizer:
    if isinstance(config, schema.AdamW):
        more["eps"] = config.eps
    made: Optimizer = resolve_name(name)(
        groups, lr=config.lr, betas=(config.beta1, config.beta2), **more
    )
    return made


def adamw(plan: Plan, groups: Groups) -> Optimizer:
    """Return AdamW in the planned implementation."""
    config = cast(schema.AdamW, plan.config.optimizer)
    implementation = plan.compute.optimizer_implementation
    if implementation == "deepspeed_cpu":  # uses vector instructions of the host
        load_adam()
        return _make("deepspeed.ops.adam:DeepSpeedCPUAdam", groups, config, adamw_mode=True)
    foreach, fused = implementation == "foreach", implementation == "fused"
    return _make("torch.optim:AdamW", groups, config, foreach=foreach, fused=fused)


def adamw_apex_fused(plan: Plan, groups: Groups) -> Optimizer:
    """Return NVIDIA apex's AdamW: one kernel per list of tensors, only for CUDA."""
    config = cast(schema.AdamW, plan.config.optimizer)
    return _make("apex.optimizers:FusedAdam", groups, config, adam_w_mode=True)


def schedule_free(plan: Plan, groups: Groups) -> Optimizer:
    """Return Schedule-Free AdamW, in training mode, with the plan's warm-up."""
    config = cast(schema.ScheduleFree, plan.config.optimizer)
    optimizer = _make(
        "schedulefree:AdamWScheduleFree",
        groups,
        config,
        warmup_steps=0,
        r=config.average_power,
        weight_lr_power=config.lr_power,
    )
    optimizer.train()  # type: ignore[attr-defined]  # schedulefree 1.4
    return optimizer


def adamw_torchao(plan: Plan, groups: Groups) -> Optimizer:
    """Return AdamW with moments of 8 or 4 bits."""
    config = cast(schema.AdamWTorchAO8bit | schema.AdamWTorchAO4bit, plan.config.optimizer)
    bits = 8 if isinstance(config, schema.AdamWTorchAO8bit) else 4
    _spare_warning()
    return _make(f"torchao.optim:AdamW{bits}bit", groups, config, block_size=config.block_size)


def adamw_bf16_sr(plan: Plan, groups: Groups) -> Optimizer:
    """Return AdamW with stochastic rounding of bfloat16 weights."""
    config = cast(schema.AdamW, plan.config.optimizer)
    _spare_warning()
    optimizer = _make("torchao.optim:_AdamW", groups, config, bf16_stochastic_round=True)
    seed_stochastic_rounding(optimizer, plan.config.seed)
    return optimizer


def _spare_warning() -> None:
    # torch 2.13 warns once that torchao 0.18's tensors have no hash for its compile cache.
    warnings.filterwarnings("ignore", message=".*_stable_hash_for_caching", category=UserWarning)


def adafactor(plan: Plan, groups: Groups) -> Optimizer:
    """Return transformers' Adafactor with a fixed learning rate."""
    config = cast(schema.Adafactor, plan.config.optimizer)
    optimizer: Optimizer = resolve_name("transformers.optimization:Adafactor")(
        groups,
        lr=config.lr,
        eps=(config.eps1, 1e-3),  # the second is only read with scale_parameter
        clip_threshold=config.clip_threshold,
        decay_rate=config.decay_rate,
        scale_parameter=False,
        relative_step=False,
        warmup_init=False,
    )
    return optimizer


def sgd(plan: Plan, groups: Groups) -> Optimizer:
    """Return SGD with decoupled weight decay (arXiv:1711.05101, algorithm 1), unlike torch's."""
    config = cast(schema.SGD, plan.config.optimizer)
    apart = [{**g, "weight_decay": 0.0, _DECAY: g["weight_decay"]} for g in groups]
    made = torch.optim.SGD(apart, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov)
    made.register_step_pre_hook(_decay)
    return made


_DECAY = "decoupled_weight_decay"
"""Key of a group: the share of a weight that is removed per step, times the learning rate."""


@torch.no_grad()
def _decay(optimizer: Optimizer, *_: object) -> None:
    for group in optimizer.param_groups:
        weights = [p for p in group["params"] if p.grad is not None]
        if group[_DECAY] and weights:
            torch._foreach_mul_(weights, 1 - group["lr"] * group[_DECAY])


def muon(plan: Plan, groups: Groups) -> Optimizer:
    """Return Muon for matrices of Transformer layers, AdamW for others. RunError: no matrices."""
    config = cast(schema.Muon, plan.config.optimizer)
    hidden, rest = split(groups, Role.hidden)
    if not hidden:
        raise RunError(
            "optimizer = muon: no trained matrix inside a Transformer layer. Muon needs one"
            "\n  -> optimizer=adamw"
        )
    # torch's default of ns_coefficients. None means `original`.
    adjust = None if config.adjust_lr is schema.AdjustLR.original else config.adjust_lr.value
    optimizer = torch.optim.Muon(
        hidden,
        lr=config.lr,
        momentum=config.momentum,
        nesterov=config.nesterov,
        ns_steps=config.ns_steps,
        adjust_lr_fn=adjust,
    )
    if not rest:
        return optimizer
    ratio = 1.0 if config.adamw_lr is None else config.adamw_lr / config.lr
    others = torch.optim.AdamW(
        [{**group, RATIO: ratio} for group in rest],
        lr=config.lr * ratio,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )
    return Composite([optimizer, others])


class Composite(Optimizer):
    """Optimizers over different parameters of one model, with one learning rate and state_dict."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = tuple(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # none is ever passed
        """Step each optimizer."""
        for part in self.parts:
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state


def seed_stochastic_rounding(optimizer: Optimizer, seed: int) -> None:
    """Seed each step's rounding by `seed` and the step: equal on all ranks and after resuming."""
    # A stack: PyTorch calls the hooks again if a step calls the step of its base class.
    entered: list[AbstractContextManager[None]] = []

    def before(*_: Any) -> None:
        # A checkpoint restores the number of steps.
        done = max((int(state["step"]) for state in optimizer.state.values() if state), default=0)
        drawn_from = hash((seed, done)) % 2**63  # hashes of integers are equal everywhere
        device = optimizer.param_groups[0]["params"][0].device
        entered.append(preserve_rng_state(device, drawn_from))
        entered[-1].__enter__()

    def after(*_: Any) -> None:
        entered.pop().__exit__(None, None, None)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


_PROJECTOR = "projector"
"""Key of a parameter's state for an object with a matrix, in both libraries."""


def galore(plan: Plan, groups: Groups) -> Optimizer:
    """Return AdamW in a subspace of a singular value decomposition, for matrices of layers."""
    config, projected = cast(schema.GaLore, plan.config.optimizer), _projected(plan, groups)
    optimizer = _make("galore_torch:GaLoreAdamW", projected, config, no_deprecation_warning=True)
    _save_projectors_as_data(optimizer, "galore_torch.galore_projector:GaLoreProjector")
    return optimizer


def apollo(plan: Plan, groups: Groups) -> Optimizer:
    """Return SGD scaled like a randomly projected AdamW, for matrices of layers."""
    config = cast(schema.Apollo, plan.config.optimizer)
    more = {"scale_type": config.scale_type.value, "proj": "random"}
    optimizer = _make("apollo_torch:APOLLOAdamW", _projected(plan, groups, **more), config)
    _save_projectors_as_data(optimizer, "apollo_torch.random_projector:GradientProjector")
    return optimizer


def _projected(plan: Plan, groups: Groups, **more: str) -> Groups:
    """Return groups with the projection's arguments. The libraries project groups with a rank."""
    config = cast(schema.GaLore | schema.Apollo, plan.config.optimizer)
    projection = {
        "rank": projection_rank(plan.config),
        "update_proj_gap": config.update_proj_gap,
        "scale": config.scale,
        "proj_type": "std",
        **more,
    }
    hidden, rest = split(groups, Role.hidden)
    return [*({**group, **projection} for group in hidden), *rest]


def _save_projectors_as_data(optimizer: Optimizer, projector: str) -> None:
    """Store objects of the class `projector` (`module:attribute`) as attributes in `state_dict`."""

    # Objects cannot be loaded with `weights_only`.
    def to_data(_: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        return _with_projectors(saved, lambda found: dict(vars(found)))

    def make(attributes: dict[str, Any]) -> Any:
        made: Any = object.__new__(resolve_name(projector))
        vars(made).update(attributes)
        return made

    def to_objects(_: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
        # Before torch reads the state: it would iterate over the strings inside.
        return _with_projectors(loaded, make)

    def to_device(restored: Optimizer) -> None:
        for parameter, state in restored.state.items():
            if _PROJECTOR in state:
                found = state[_PROJECTOR]
                found.ortho_matrix = found.ortho_matrix.to(parameter.device)

    optimizer.register_state_dict_post_hook(to_data)
    optimizer.register_load_state_dict_pre_hook(to_objects)
    optimizer.register_load_state_dict_post_hook(to_device)


def _with_projectors(saved: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    states = {
        key: {name: change(value) if name == _PROJECTOR else value for name, value in state.items()}
        for key, state in saved["state"].items()
    }
    return {**saved, "state": states}


def projected_parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return parameters whose states are in a subspace."""
    return [p for p, state in optimizer.state.items() if _PROJECTOR in state]


def eight_bit(plan: Plan, groups: Groups) -> Optimizer:
    """Return AdamW or Lion with 8-bit moments, paged on a GPU with `paged_adamw_8bit`."""
    config = cast(schema.AdamW8bit | schema.Lion8bit, plan.config.optimizer)
    paged = optimizer_entry(config).pages and plan.device.kind == "cuda"
    _skip_optimizer_sync(paged)
    name = "AdamW8bit" if isinstance(config, schema.AdamW8bit) else "Lion8bit"
    size = config.min_8bit_size
    optimizer = _make(
        f"bitsandbytes.optim:{name}", groups, config, min_8bit_size=size, is_paged=paged
    )
    if paged:
        optimizer.register_step_pre_hook(restore_paged_state)
    if config.embeddings_32bit:
        _keep_embeddings_in_32_bits(optimizer, groups)
    return optimizer


def lion(plan: Plan, groups: Groups) -> Optimizer:
    """Return Lion with a float32 momentum."""
    _skip_optimizer_sync(paged=False)
    return _make("bitsandbytes.optim:Lion", groups, cast(schema.Lion, plan.config.optimizer))


def _skip_optimizer_sync(paged: bool) -> None:
    """Skip bitsandbytes' wait for the GPU after each parameter, in this process."""
    from bitsandbytes import utils
    from bitsandbytes.optim import optimizer

    # bitsandbytes 0.50 (optim/optimizer.py, step) waits hundreds of times per step. Only paged
    # states need it: moving pages is asynchronous.
    if hasattr(optimizer, "sync_gpu"):  # the stream keeps the order of kernels
        vars(optimizer)["sync_gpu"] = utils.sync_gpu if paged else lambda tensor: None


def restore_paged_state(optimizer: Any, *_: Any) -> None:
    """Move states back into paged memory, which loading a checkpoint does not use."""
    for parameter, state in optimizer.state.items():
        if parameter.numel() < PAGED_MIN_SIZE:
            continue
        for name in ("state1", "state2"):
            found = state.get(name)
            if found is not None and not getattr(found, "is_paged", False):
                state[name] = optimizer.get_state_buffer(parameter, dtype=found.dtype)
                state[name].copy_(found)


def _keep_embeddings_in_32_bits(optimizer: Any, groups: Groups) -> None:
    """Give embeddings 32-bit states (transformers#14819)."""
    from bitsandbytes.optim import GlobalOptimManager

    # bitsandbytes keeps such exceptions by `id` in one manager per process, where they would also
    # apply to parameters of a later model with the same id. Use a separate manager.
    manager = GlobalOptimManager.__new__(GlobalOptimManager)  # its __init__ always raises
    manager.initialize()
    tables, _ = split(groups, Role.embedding)
    manager.override_config([p for group in tables for p in group["params"]], "optim_bits", 32)
    manager.register_parameters(optimizer.param_groups)
    optimizer.mng = manager
