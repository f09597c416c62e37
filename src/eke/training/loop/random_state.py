"""Every generator a training step may draw from, as plain values and tensors."""

import random
from typing import Any

import numpy as np
import torch

RandomState = dict[str, Any]
"""`torch` and `cuda` hold tensors, `python` and `numpy` numbers: loadable with `weights_only`."""


def capture_random_state() -> RandomState:
    """The state of this process's generators now.

    Those of GPUs only once CUDA is in use: asking would start it, in a run on the CPU too.
    """
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": _cuda_states(),
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
    }


def restore_random_state(state: RandomState) -> None:
    """Continue where the generators stood; of GPUs, as many of the first as there are here."""
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), *rest))


def _cuda_states() -> list[torch.Tensor]:
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch 2.13
    return torch.cuda.get_rng_state_all() if in_use else []
