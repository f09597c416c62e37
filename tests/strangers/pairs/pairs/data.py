"""Pairs of token sequences, as a map and as a stream."""

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, IterableDataset


def pair(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    length = int(torch.randint(4, 9, (1,), generator=generator))
    a = torch.randint(1, 50, (length,), generator=generator)
    return a, a.flip(0)[: length - 1]


class Pairs(Dataset):
    def __init__(self, split: str, count: int = 16) -> None:
        self.count, self.offset = count, 0 if split == "train" else 100

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int):
        return pair(self.offset + index)


class Stream(IterableDataset):
    def __init__(self, split: str) -> None:
        self.offset = 0 if split == "train" else 100
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        for index in range(16):
            yield pair(self.offset + (index * 5 + self.epoch) % 16)


def collate(samples):
    a, b = (pad_sequence(list(each), batch_first=True) for each in zip(*samples, strict=True))
    return {"a": a, "b": b, "a_mask": a > 0, "b_mask": b > 0}


def stream(split: str):
    return Stream(split), collate
