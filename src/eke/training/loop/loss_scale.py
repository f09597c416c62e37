"""The loss scale of float16 where torch's GradScaler cannot step the optimizer itself."""

from dataclasses import asdict, dataclass

GROWTH_INTERVAL = 2000
"""Steps without an overflow before the scale is doubled: torch.amp.GradScaler's default."""


@dataclass
class LossScale:
    """Halved after an overflow, doubled after long without one, as torch's GradScaler."""

    value: float = 2.0**16
    """The factor; it starts as torch's does."""
    good_steps: int = 0
    """Since the last change."""

    def update(self, overflowed: bool) -> None:
        """After a step that was taken, or skipped because its gradients were not finite."""
        if overflowed:
            self.value, self.good_steps = self.value / 2, 0
            return
        self.good_steps += 1
        if self.good_steps == GROWTH_INTERVAL:
            self.value, self.good_steps = self.value * 2, 0

    def state_dict(self) -> dict[str, float]:
        """Plain numbers, for a checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue with what `state_dict` gave."""
        self.value, self.good_steps = state["value"], int(state["good_steps"])
