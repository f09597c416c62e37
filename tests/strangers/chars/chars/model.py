"""A small decoder that returns logits and loss, as many research projects have one."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Sizes:
    hidden: int = 32
    depth: int = 2
    heads: int = 2
    vocab: int = 64
    length: int = 16
    dropout: float = 0.0


class Block(nn.Module):
    def __init__(self, config: Sizes) -> None:
        super().__init__()
        self.heads = config.heads
        self.before = nn.LayerNorm(config.hidden)
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)
        self.after = nn.LayerNorm(config.hidden)
        self.mlp = nn.Sequential(
            nn.Linear(config.hidden, 4 * config.hidden),
            nn.GELU(),
            nn.Linear(4 * config.hidden, config.hidden),
            nn.Dropout(config.dropout),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        split = (rows, length, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(self.before(x)).view(split).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(self.after(x))


class Decoder(nn.Module):
    def __init__(self, config: Sizes) -> None:
        super().__init__()
        self.table = nn.Embedding(config.vocab, config.hidden)
        self.places = nn.Parameter(torch.randn(config.length, config.hidden) * 0.02)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        self.head.weight = self.table.weight
        nn.init.normal_(self.table.weight, std=0.02)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None):
        hidden = self.table(x) + self.places[: x.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        if y is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-1)
