"""What a training step computed a second time, in its backward pass."""

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from eke.training.model.checkpoint_contexts import KEPT, is_repeating


class RecomputationProbe(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch 2.13
    """Counts the operations of forward passes that are repeated inside a backward pass.

    Example:
        with RecomputationProbe() as probe:
            train_step()
        probe.num_dear   # 0 with selective checkpointing
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch 2.13: no annotations
        self._counts: Counter[str] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Optimizers that compile their step (torchao's) do so under this mode, too."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Notes the operation, then runs it."""
        if is_repeating():
            self._counts[getattr(func, "overloadpacket", func).__name__] += 1
        return func(*args, **(kwargs or {}))

    @property
    def num_operations(self) -> int:
        """Repeated operations of any kind."""
        return sum(self._counts.values())

    @property
    def num_dear(self) -> int:
        """Repeated matrix multiplications of linear layers, and fused attention kernels."""
        return sum(self._counts[name] for name in KEPT)
