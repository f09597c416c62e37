"""Optimizers of torchao (0.18 tested); each compiles its step at first use."""

import warnings
from typing import Any

import torch

from eke.config.schema import AdamW, AdamWTorchAO4bit, AdamWTorchAO8bit
from eke.plan.planner import Plan
from eke.training.optimizer.groups import Groups


def adamw_8bit(plan: Plan, groups: Groups) -> torch.optim.Optimizer:
    """AdamW with 8-bit moments."""
    config = plan.config.optimizer
    assert isinstance(config, AdamWTorchAO8bit)
    return _build("AdamW8bit", config, groups, block_size=config.block_size)


def adamw_4bit(plan: Plan, groups: Groups) -> torch.optim.Optimizer:
    """AdamW with 4-bit moments."""
    config = plan.config.optimizer
    assert isinstance(config, AdamWTorchAO4bit)
    return _build("AdamW4bit", config, groups, block_size=config.block_size)


def adamw_bf16_sr(plan: Plan, groups: Groups) -> torch.optim.Optimizer:
    """AdamW that rounds bfloat16 weights up or down at random, right on average.

    The random numbers are a function of the seed and the step alone: ranks round alike, so that
    their copies of the weights stay equal, and a continued run rounds as an undisturbed one.
    """
    config = plan.config.optimizer
    assert isinstance(config, AdamW)
    optimizer = _build("_AdamW", config, groups, bf16_stochastic_round=True)
    round_alike(optimizer, plan.config.seed)
    return optimizer


def _build(name: str, config: AdamW, groups: Groups, **more: Any) -> torch.optim.Optimizer:
    # torch 2.13 says once that torchao 0.18's tensors name no hash for its cache of compiled code.
    warnings.filterwarnings("ignore", message=".*_stable_hash_for_caching", category=UserWarning)
    import torchao.optim

    optimizer: torch.optim.Optimizer = getattr(torchao.optim, name)(
        groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, **more
    )
    return optimizer


def round_alike(optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Draw the random numbers of each step from a generator seeded by `seed` and the step.

    The default generators, of dropout, are left as they were before the step.
    """
    kept: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    """A stack: PyTorch calls the hooks once more where a step calls that of a class it extends."""

    def before(*_: Any) -> None:
        drawn_from = hash((seed, _steps_done(optimizer))) % 2**63  # of integers: the same anywhere
        gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        kept.append((torch.get_rng_state(), gpu))
        torch.default_generator.manual_seed(drawn_from)
        if gpu is not None:
            torch.cuda.manual_seed(drawn_from)

    def after(*_: Any) -> None:
        cpu, gpu = kept.pop()
        torch.set_rng_state(cpu)
        if gpu is not None:
            torch.cuda.set_rng_state(gpu)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def _steps_done(optimizer: torch.optim.Optimizer) -> int:
    """Steps so far; read from the state, which a checkpoint brings back."""
    return max((int(state["step"]) for state in optimizer.state.values() if state), default=0)
