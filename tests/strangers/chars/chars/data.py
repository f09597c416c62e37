"""Rows of a text by characters. The targets behind a row's own length are -1."""

import torch
from torch.utils.data import Dataset

TEXT = "the quick brown fox jumps over the lazy dog. " * 40


class Rows(Dataset):
    def __init__(self, split: str, count: int = 24, length: int = 16, ragged: bool = True) -> None:
        self.start = 0 if split == "train" else 500
        self.count, self.length, self.ragged = count if split == "train" else 6, length, ragged

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        begin = self.start + index * 7
        codes = [ord(c) % 64 for c in TEXT[begin : begin + self.length + 1]]
        x, y = torch.tensor(codes[:-1]), torch.tensor(codes[1:])
        if self.ragged:
            y[4 + index * 5 % (self.length - 3) :] = -1
        return {"x": x, "y": y}
