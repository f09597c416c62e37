"""An image classifier with dropped paths."""

import torch
import torch.nn.functional as F
from torch import nn


class DropPath(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.rate == 0:
            return x
        kept = (torch.rand(x.shape[0], 1, 1, device=x.device) >= self.rate).to(x.dtype)
        return x * kept / (1 - self.rate)


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, rate: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.drop = DropPath(rate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(x)
        x = x + self.drop(self.attention(normed, normed, normed, need_weights=False)[0])
        return x + self.drop(self.mlp(self.norm2(x)))


class ViT(nn.Module):
    def __init__(
        self, width: int = 16, depth: int = 2, rate: float = 0.0, classes: int = 4
    ) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, width, 4, 4)
        rates = [x.item() for x in torch.linspace(0, rate, depth)]
        self.layers = nn.Sequential(*(Layer(width, 2, each) for each in rates))
        self.head = nn.Linear(width, classes)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        return self.head(self.layers(x).mean(1))


def smooth(output: torch.Tensor, batch, epsilon: float = 0.1) -> torch.Tensor:
    return F.cross_entropy(output, batch["label"], label_smoothing=epsilon)


def summed(output: torch.Tensor, batch):
    total = F.cross_entropy(output, batch["label"], reduction="sum")
    return total, len(output)


class Partly(ViT):
    """A classifier with a head that no loss reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(16, 4)


class Counts(ViT):
    """A classifier with state that a checkpoint lacks."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls, self.mask = how, 0, None
        self.register_buffer("seen", torch.zeros(1), persistent=how == "saved")

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.mask = torch.ones(1)
        if self.training and self.how == "attribute":
            self.calls += 1
        if self.training and self.how in ("buffer", "saved"):
            self.seen += 1
        return super().forward(image)
