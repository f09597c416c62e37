"""An optimizer, a schedule, and a loss for logits with labels."""

import torch
import torch.nn.functional as F


class Momentum(torch.optim.Optimizer):
    def __init__(self, params, lr: float, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                held = self.state[p].setdefault("held", torch.zeros_like(p))
                held.mul_(group["beta"]).add_(p.grad)
                p.add_(held, alpha=-group["lr"])


def falling(step: int, total_steps: int, power: float = 1.0) -> float:
    return (1 - step / total_steps) ** power


def focal(output, batch, gamma: float = 2.0) -> torch.Tensor:
    labels = batch["labels"].flatten()
    each = F.cross_entropy(output.logits.flatten(0, 1), labels, ignore_index=-100, reduction="none")
    weight = (1 - (-each).exp()) ** gamma
    return (weight * each).sum() / (labels >= 0).sum()


def compute_metrics(eval_pred):
    logits, labels = eval_pred
    return {"accuracy": (logits.argmax(-1) == labels).mean()}


class Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = torch.nn.BatchNorm2d(1), torch.nn.Linear(256, 4)

    def forward(self, image):
        return self.head(self.norm(image).flatten(1))


class Asks(torch.nn.Module):
    """A classifier whose forward pass asks for values, or has kernels with memory of their own."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.head = how, torch.nn.Linear(256, 4)
        self.rnn = torch.nn.LSTM(16, 16, batch_first=True)
        self.conv = torch.nn.Conv1d(16, 16, 3, padding=1)

    def forward(self, image):
        x = image.flatten(1)
        if self.how == "item":
            x = x * int(x.sum().item() > 0)
        elif self.how == "index":
            x = x + x[x > 0].sum()
        elif self.how == "nonzero":
            x = x + len(x.nonzero())
        elif self.how == "numpy":
            x = x + float(x.detach().numpy().sum())
        elif self.how == "lstm":
            x = self.rnn(image[:, 0])[0].flatten(1)
        elif self.how == "conv1d":
            x = self.conv(image[:, 0]).flatten(1)
        return self.head(x)


def loader(split: str):
    return torch.utils.data.DataLoader([1, 2, 3])


def nothing(split: str):
    return []


def count_all(batch) -> int:
    return batch["y"].numel()
