"""The fake GPU of a memory trace, registered from Python (PrivateUse1), once per process.

It has CUDA's autocast rules and attention kernels. A fake `cuda` device would abort the process if
torch was built without CUDA, and fake `cpu` tensors use the CPU's operators, which differ.
"""

import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import backend_registration

from eke.training.trace.fake_device import register_autocast
from eke.training.trace.operations import register_attention

FAKE_GPU = "fakegpu"

_DEVICE_MODULE = SimpleNamespace(
    # If it were available, torch would copy constants to it, without a kernel for that.
    is_available=lambda: False,
    is_initialized=lambda: False,
    _is_in_bad_fork=lambda: False,
    device_count=lambda: 1,
    current_device=lambda: 0,
    manual_seed_all=lambda seed: None,
    get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],  # CUDA's
    # As long as CUDA's state: seed and offset.
    get_rng_state=lambda device=None: torch.empty(16, dtype=torch.uint8, device="cpu"),
    set_rng_state=lambda state, device=None: None,
)
"""Functions that torch requires in the module of a device."""


def fake_gpu() -> torch.device:
    """Return the device, registered at the first call."""
    _register()
    return torch.device(FAKE_GPU, 0)


@functools.cache
def _register() -> object:
    register: Any = backend_registration._setup_privateuseone_for_python_backend
    register(FAKE_GPU, backend_module=_DEVICE_MODULE)
    # Objects that keep the registrations.
    return register_autocast(FAKE_GPU), register_attention()
