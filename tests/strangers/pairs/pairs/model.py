"""Two towers with one embedding, trained with the other pairs of a batch as negatives."""

import torch
import torch.nn.functional as F
from torch import nn


class Tower(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        one = dict(batch_first=True, dropout=0.0, dim_feedforward=2 * width)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, 2, **one) for _ in range(2))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=~mask)
        kept = mask[..., None].to(x.dtype)
        return F.normalize((x * kept).sum(1) / kept.sum(1), dim=-1)


class TwoTowers(nn.Module):
    def __init__(self, width: int = 16, vocab: int = 50) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab, width)
        self.left, self.right = Tower(width), Tower(width)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, a: torch.Tensor, b: torch.Tensor, a_mask: torch.Tensor, b_mask: torch.Tensor):
        left, right = self.left(self.table(a), a_mask), self.right(self.table(b), b_mask)
        scores = left @ right.T * self.scale.exp()
        return {
            "scores": scores,
            "loss": F.cross_entropy(scores, torch.arange(len(a)).to(a.device)),
        }
