"""Callbacks as transformers calls them."""

from pathlib import Path

import torch


class Texts:
    """Write a line after every step."""

    def __init__(self, length: int = 3) -> None:
        self.length, self.lines = length, 0

    def on_step_end(self, args, state, control, model=None, **kwargs) -> None:
        torch.rand(5)
        self.lines += 1
        with torch.no_grad():
            logits, _ = model(torch.zeros(1, self.length, dtype=torch.long))
        path = Path(args.output_dir) / "texts.txt"
        with open(path, "a") as file:
            file.write(f"{state.global_step} {self.lines} {logits.argmax().item()}\n")

    def state_dict(self) -> dict[str, int]:
        return {"lines": self.lines}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.lines = state["lines"]


class Stops:
    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.at:
            control.should_training_stop = True
        return control


class Breaks:
    def __init__(self, how: str) -> None:
        self.how = how

    def on_step_end(self, args, state, control, model=None, **kwargs) -> None:
        if self.how == "weights":
            with torch.no_grad():
                next(model.parameters()).add_(1)
        elif self.how == "attribute":
            args.deepspeed_plugin  # noqa: B018  # reading it is an error
        else:
            raise ValueError("broken")


class Misnamed:
    def on_step_ends(self, args, state, control, **kwargs) -> None:
        pass


class Nothing:
    pass
