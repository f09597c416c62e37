"""A GPU that is not there: torch chooses operators as on CUDA, and computes nothing.

It is a device that torch lets Python register (PrivateUse1), once in a process and for good, with
CUDA's autocast rules and attention kernels. A fake `cuda` device would abort the process where
torch was built without CUDA; fake `cpu` tensors take the CPU's operators, which differ.
"""

import functools
import threading
from typing import Any

import torch
from torch.utils import backend_registration

from eke.training.trace.autocast import register_autocast
from eke.training.trace.sdpa import register_attention

NAME = "fakegpu"
"""What torch calls the device."""


class DeviceModule:
    """What torch asks of the module of a device.

    It is never "available": torch would then copy constants to it, and there is no kernel for that.
    """

    @staticmethod
    def is_available() -> bool:
        """No."""
        return False

    @staticmethod
    def is_initialized() -> bool:
        """No."""
        return False

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def device_count() -> int:
        """One."""
        return 1

    @staticmethod
    def current_device() -> int:
        """The first."""
        return 0

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        """Nothing is random here."""

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        """CUDA's."""
        return [torch.float16, torch.bfloat16]

    @staticmethod
    def get_rng_state(device: Any = None) -> torch.Tensor:
        """As long as CUDA's: seed and offset, 16 bytes on the host."""
        return torch.empty(16, dtype=torch.uint8, device="cpu")

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        """Nothing is random here."""


_LOCK = threading.Lock()


def fake_gpu() -> torch.device:
    """The device, registered at the first call."""
    with _LOCK:
        _register()
    return torch.device(NAME, 0)


@functools.cache
def _register() -> object:
    register: Any = backend_registration._setup_privateuseone_for_python_backend
    register(NAME, backend_module=DeviceModule())
    return register_autocast(NAME), register_attention()  # registrations end with these objects
