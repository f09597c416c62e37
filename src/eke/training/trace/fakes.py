"""The surroundings in which a training step runs on tensors without data."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import optimizer as optimizers
from torch.utils import _foreach_utils

from eke.training.trace.autocast import weight_copies


@contextlib.contextmanager
def fake_surroundings() -> Iterator[None]:
    """What libraries must be told, so that they take fake tensors for real ones."""
    clear = torch.clear_autocast_cache

    def clear_autocast_cache() -> None:
        weight_copies.clear()
        clear()

    listed: Any = (optimizers._foreach_supported_types, _foreach_utils._foreach_supported_types)
    with contextlib.ExitStack() as stack:
        # Backward passes in this thread: in the device's own, the trace would not see them.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(mock.patch.object(torch, "clear_autocast_cache", clear_autocast_cache))
        # A machine with GPUs traces as one without: PyTorch would ask the driver in between, and
        # compute constants on a device that has no kernels (FakeTensorMode.avoid_device_init).
        stack.enter_context(mock.patch.object(torch.cuda, "is_available", _no))
        stack.enter_context(_constants_stay_on_the_host())
        # No gradient overflows: the loss scaler steps, without asking the device.
        stack.enter_context(mock.patch.object(torch.amp.GradScaler, "_maybe_opt_step", _step))
        # torch 2.13 refuses to compile below a dispatch mode: compiled steps run eagerly.
        stack.enter_context(mock.patch.object(torch, "compile", _not_compiled))
        stack.enter_context(mock.patch.object(torch, "Generator", _host_generator))
        for place in (torch, torch.random):
            stack.enter_context(mock.patch.object(place, "get_rng_state", _random_state))
            stack.enter_context(mock.patch.object(place, "set_rng_state", _nothing))
        if "bitsandbytes" in sys.modules:
            stack.enter_context(mock.patch(_TABLES, _fake_tables))
            for name, fake in _PAGES.items():
                stack.enter_context(mock.patch(f"bitsandbytes.functional.{name}", fake))
        for name in _TRACING:
            stack.enter_context(mock.patch(name, _no))
        for types in listed:  # else foreach silently becomes a loop
            types.append(FakeTensor)
            stack.callback(types.remove, FakeTensor)
        stack.callback(weight_copies.clear)
        yield


def _step(_: Any, optimizer: Any, __: Any, *args: Any, **kwargs: Any) -> Any:
    return optimizer.step(*args, **kwargs)


RANDOM_STATE_BYTES = torch.get_rng_state().numel()
"""Of the host's generator; checkpointing keeps one for each layer."""


def _random_state() -> torch.Tensor:
    """A tensor as any other, where the true one is made behind the trace's back."""
    return torch.empty(RANDOM_STATE_BYTES, dtype=torch.uint8, device="cpu")


def _nothing(*_: Any) -> None:
    """There is no state to restore."""


_TABLES = "bitsandbytes.optim.optimizer.Optimizer8bit.fill_qmap"


def _fake_tables(optimizer: Any) -> None:
    """In place of two tables of 256 numbers that are computed from data."""
    optimizer.name2qmap = {name: torch.empty(256) for name in ("dynamic", "udynamic")}


def _not_compiled(function: Any = None, **_: Any) -> Any:
    return function if function is not None else _not_compiled


_TRUE_GENERATOR = torch.Generator


def _host_generator(device: Any = None) -> torch.Generator:
    """The fake device has no generator, and nothing is drawn from one."""
    return _TRUE_GENERATOR()


def _fake_pages(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Paged memory is the driver's, and counted as the host's: PyTorch reserves none for it."""
    pages: Any = torch.empty(shape, dtype=dtype, device="cpu")
    pages.is_paged, pages.page_deviceid = True, device.index
    return pages  # type: ignore[no-any-return]  # tensor with bitsandbytes' attributes


_PAGES = {"get_paged": _fake_pages, "fill": _nothing, "prefetch_tensor": _nothing}
"""Functions of bitsandbytes that need its CUDA build -> what stands in for them."""

_TRACING = (
    "transformers.masking_utils.is_tracing",
    "transformers.modeling_attn_mask_utils.is_tracing",
)
"""Where transformers 5 takes fake tensors for a graph being captured, in which it builds masks that
a run does not have."""


def _no(*_: Any) -> bool:
    return False


@contextlib.contextmanager
def _constants_stay_on_the_host() -> Iterator[None]:
    """`torch.tensor(value, device=...)` makes a tensor of the host, which is then moved as others.

    FakeTensorMode says so while it is entered; a trace enters it for one operator at a time.
    """
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


def to_fake(model: nn.Module, mode: FakeTensorMode, device: torch.device) -> nn.Module:
    """Replace the tensors of a model on the meta device, in place; ties stay.

    `Module.to` fails on fake parameters.
    """
    made: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            with mode:
                new = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
                )
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, tensor.requires_grad)
            made[id(tensor)] = new
        return made[id(tensor)]

    for module in model.modules():
        owners: Any = (module._parameters, module._buffers, vars(module))
        for owner in owners:
            owner |= {n: fake(x) for n, x in owner.items() if isinstance(x, torch.Tensor)}
    return model
