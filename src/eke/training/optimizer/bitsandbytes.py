"""Optimizers with quantised states, or with float32 Lion: bitsandbytes (0.50 tested)."""

from typing import Any

import torch

from eke.config.schema import AdamW8bit, Lion, Lion8bit
from eke.models.sizes import PAGED_MIN_SIZE, Role, describe
from eke.plan.planner import Plan
from eke.training.optimizer.groups import Groups, split


def adamw_8bit(plan: Plan, groups: Groups) -> torch.optim.Optimizer:
    """8-bit AdamW; its moments lie in paged memory of a GPU with `paged_adamw_8bit`."""
    from bitsandbytes.optim import AdamW8bit as BitsAndBytes

    config = plan.config.optimizer
    assert isinstance(config, AdamW8bit)
    paged = describe(config).pages and plan.device.kind == "cuda"
    optimizer: torch.optim.Optimizer = BitsAndBytes(
        groups,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        min_8bit_size=config.min_8bit_size,
        is_paged=paged,
    )
    if paged:
        optimizer.register_step_pre_hook(page_again)
    spare_waiting(paged)
    if config.embeddings_32bit:
        keep_embeddings_in_32_bits(optimizer, groups)
    return optimizer


def lion(plan: Plan, groups: Groups) -> torch.optim.Optimizer:
    """Lion with a float32 momentum."""
    from bitsandbytes.optim import Lion as BitsAndBytes

    config = plan.config.optimizer
    assert isinstance(config, Lion)
    optimizer: torch.optim.Optimizer = BitsAndBytes(
        groups, lr=config.lr, betas=(config.beta1, config.beta2)
    )
    spare_waiting(paged=False)
    return optimizer


def lion_8bit(plan: Plan, groups: Groups) -> torch.optim.Optimizer:
    """Lion with an 8-bit momentum."""
    from bitsandbytes.optim import Lion8bit as BitsAndBytes

    config = plan.config.optimizer
    assert isinstance(config, Lion8bit)
    optimizer: torch.optim.Optimizer = BitsAndBytes(
        groups,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        min_8bit_size=config.min_8bit_size,
    )
    spare_waiting(paged=False)
    if config.embeddings_32bit:
        keep_embeddings_in_32_bits(optimizer, groups)
    return optimizer


def spare_waiting(paged: bool) -> None:
    """Let a step go on to the next parameter without waiting for the GPU; for this process.

    bitsandbytes 0.50 waits after each parameter (optim/optimizer.py, step), which only pages need,
    since moving them is asynchronous: hundreds of waits in a step, in which nothing is queued.

    Args:
        paged: the optimizer that is built has pages, and waits as bitsandbytes has it.
    """
    from bitsandbytes import utils
    from bitsandbytes.optim import optimizer

    if hasattr(optimizer, "sync_gpu"):
        vars(optimizer)["sync_gpu"] = utils.sync_gpu if paged else _wait_for_nothing


def _wait_for_nothing(_: torch.Tensor) -> None:
    """The stream keeps the order of kernels."""


def page_again(optimizer: Any, *_: Any) -> None:
    """Put states back into paged memory: loading a checkpoint leaves them in the GPU's own."""
    for parameter, state in optimizer.state.items():
        if parameter.numel() < PAGED_MIN_SIZE:
            continue
        for name in ("state1", "state2"):
            found = state.get(name)
            if found is not None and not getattr(found, "is_paged", False):
                state[name] = optimizer.get_state_buffer(parameter, dtype=found.dtype)
                state[name].copy_(found)


def keep_embeddings_in_32_bits(optimizer: Any, groups: Groups) -> None:
    """Give embeddings 32-bit states (transformers#14819).

    bitsandbytes keeps such exceptions in one manager for the whole process, by `id`: of another
    model's parameters, too, once theirs are freed. So this optimizer gets a manager of its own.
    """
    from bitsandbytes.optim import GlobalOptimManager

    manager = GlobalOptimManager.__new__(GlobalOptimManager)  # its __init__ always raises
    manager.initialize()
    tables, _ = split(groups, Role.embedding)
    manager.override_config([p for group in tables for p in group["params"]], "optim_bits", 32)
    manager.register_parameters(optimizer.param_groups)
    optimizer.mng = manager
