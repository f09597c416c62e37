"""Every generator a training step may draw from, as plain values and tensors."""

import random
from typing import Any

import numpy as np
import torch

RandomState = dict[str, Any]
"""`torch` and `cuda` hold tensors, `python` and `numpy` numbers: loadable with `weights_only`."""


def capture_random_state() -> RandomState:
    """The state of this process's generators now."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
    }


def restore_random_state(state: RandomState) -> None:
    """Continue where the generators stood."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), *rest))
