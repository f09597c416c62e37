"""Several optimizers that look like one: to the loop, to a loss scaler, and in a checkpoint."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer


class Composite(Optimizer):
    """Optimizers over different parameters of one model, stepped together.

    Groups and states are the parts' own: a learning rate that is set here is the part's, and
    `state_dict` has torch's ordinary form, numbered through all parts.
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = tuple(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # torch 2.13 types step twice
        """One step of each part; `closure` is evaluated once, before them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        """Let the parts work on this optimizer's states and groups."""
        start = 0
        for part in self.parts:
            end = start + len(part.param_groups)
            part.param_groups = self.param_groups[start:end]
            part.state = self.state
            start = end
