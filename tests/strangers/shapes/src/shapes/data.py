"""Images of four classes with noise and flips."""

import random

import numpy as np
import torch
from torch.utils.data import Dataset


class Images(Dataset):
    def __init__(self, root: str = "train", augment: bool = True, count: int = 20) -> None:
        self.count, self.offset, self.augment = count, 0 if root == "train" else 1000, augment

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int):
        label = index % 4
        generator = torch.Generator().manual_seed(self.offset + index)
        image = torch.randn(1, 16, 16, generator=generator) * 0.3
        image[:, :, label * 4 : label * 4 + 4] += 1
        if self.augment:
            image = image + 0.1 * torch.randn(1, 16, 16)
            image = image * float(np.random.uniform(0.9, 1.1))
            if random.random() < 0.5:
                image = image.flip(1)
        return image, label
