"""Counting PyTorch's operations: the same on every machine, however noisy."""

from collections import Counter
from typing import Any

from loops import LOG_EVERY, Loop
from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Counts the operations of its context."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch 2.13
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one, and run it."""
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    def per_step(self, num_steps: int) -> dict[str, float]:
        """All of them, and those that read a value: on a GPU the host would wait there."""
        reads = self.counts["_local_scalar_dense"]
        return {"all": self.counts.total() / num_steps, "reads": reads / num_steps}


def count_operations(loop: Loop) -> dict[str, float]:
    """Per step, its batch and its writes included; of a loop in this thread."""
    operations = Operations()
    with operations:
        loop.advance(LOG_EVERY)
    return operations.per_step(LOG_EVERY)
