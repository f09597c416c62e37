"""Giving the allocator's unused blocks back to the GPU."""

import torch

from eke.plan.planner import Plan


class CacheRelease:
    """Empties the caching allocator in every n-th step, between forward and backward pass.

    That is where HF Trainer's `torch_empty_cache_steps` does it, and where it lowers the peak: the
    forward pass's temporaries are free, and the backward pass asks for blocks of other sizes.
    """

    def __init__(self, every: int | None, device: torch.device) -> None:
        self.every = every
        self.device = device
        self.calls = 0
        """Times the allocator was emptied."""

    def after_forward(self, step: int) -> None:
        """The forward pass of a micro-batch of this step (counted from 0) is over."""
        if self.every is None or (step + 1) % self.every or self.device.type != "cuda":
            return  # PyTorch caches no blocks on a CPU: there is nothing to give back
        torch.cuda.empty_cache()
        self.calls += 1


def build_cache_release(plan: Plan, device: torch.device) -> CacheRelease:
    """What `memory.empty_cache_every` asks for."""
    return CacheRelease(plan.config.memory.empty_cache_every, device)
