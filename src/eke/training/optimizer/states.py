"""The tensors an optimizer's state is made of, whatever library keeps them."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from eke.training.distributed.sharding import part


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    """Every plain tensor of the state but scalars, shared ones once."""
    found = [t for state in optimizer.state.values() for t in plain_tensors(state)]
    return list({t.untyped_storage().data_ptr(): t for t in found if t.dim()}.values())


def plain_tensors(value: Any) -> Iterator[Tensor]:
    """The tensors inside a value: of dicts, of objects' attributes, of quantised tensors."""
    if isinstance(value, Tensor):
        yield from _parts(value)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from plain_tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from plain_tensors(part)
    elif hasattr(value, "__dict__"):
        yield from plain_tensors(vars(value))


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """This process's tensors: FSDP2's are cut, torchao's quantised ones say what they wrap."""
    tensor = part(tensor)
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from _parts(getattr(tensor, name))


def is_quantised(state: Mapping[str, Any]) -> bool:
    """Whether a parameter's state holds codes instead of numbers."""
    return any(not t.is_floating_point() and t.dim() for t in plain_tensors(state))


def num_paged_bytes(optimizer: Optimizer) -> int:
    """Bytes of state that bitsandbytes keeps in unified memory, to be moved out when it is full."""
    return sum(
        t.numel() * t.element_size()
        for state in optimizer.state.values()
        for t in plain_tensors(state)
        if getattr(t, "is_paged", False)
    )
