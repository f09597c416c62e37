"""What a step does, counted: the same on every machine, however noisy."""

import cProfile
import pstats
from collections import Counter
from typing import Any

from loops import LOG_EVERY, Loop
from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Counts PyTorch's operations of its context."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch 2.13
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one, and run it."""
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def count_work(loop: Loop) -> dict[str, float]:
    """Per step of a loop in this thread, its batch and its writes included.

    Returns:
        `operations` of PyTorch; `reads` of a tensor's value, at which the host waits for a GPU;
        `calls` of functions in Python.
    """
    operations = Operations()
    with operations:
        loop.advance(LOG_EVERY)
    profile = cProfile.Profile()
    profile.runcall(loop.advance, LOG_EVERY)
    return {
        "operations": operations.counts.total() / LOG_EVERY,
        "reads": operations.counts["_local_scalar_dense"] / LOG_EVERY,
        "calls": pstats.Stats(profile).total_calls / LOG_EVERY,  # type: ignore[attr-defined]  # typeshed
    }
