"""Bits per character."""

import math

import torch
import torch.nn.functional as F


class Bits:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, output, batch) -> None:
        logits, _ = output
        torch.rand(3)  # a metric may draw
        y = batch["y"].flatten()
        self.total += float(
            F.cross_entropy(logits.flatten(0, 1), y, ignore_index=-1, reduction="sum")
        )
        self.count += int((y >= 0).sum())

    def compute(self) -> dict[str, float]:
        return {"mean": self.total / self.count / math.log(2), "count": self.count}


def first_is_right(output, batch):
    logits, _ = output
    return (logits[:, 0].argmax(-1) == batch["y"][:, 0]).float().mean()
