"""Random weights that are the same in every format: drawn in float32, then rounded.

PyTorch's generators draw other numbers for bfloat16 than for float32 on a CPU (torch 2.11: always;
2.13: the last ones of a tensor whose size is no multiple of 16), and runs in two formats would
begin with different models.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

DRAWS = (torch.ops.aten.normal_, torch.ops.aten.uniform_)
"""What transformers' and PyTorch's initialisations draw with, in place."""


def drawn_in_float32(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Context in which weights of this format are initialised."""
    if dtype is torch.float32:
        return nullcontext()
    return _InFloat32()  # type: ignore[no-untyped-call]  # torch 2.13


class _InFloat32(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch 2.13
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket not in DRAWS or args[0].dtype is torch.float32:
            return func(*args, **(kwargs or {}))
        narrow, *how = args
        wide = torch.empty_like(narrow, dtype=torch.float32)
        func(wide, *how, **(kwargs or {}))
        return narrow.copy_(wide)
