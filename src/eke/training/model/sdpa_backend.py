"""The one kernel that scaled dot-product attention may use."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn.attention import SDPBackend, sdpa_kernel

from eke.common.errors import RunError
from eke.config.schema import Backend
from eke.plan.planner import Plan

BACKENDS: dict[Backend, SDPBackend | None] = {
    Backend.auto: None,
    Backend.flash: SDPBackend.FLASH_ATTENTION,
    Backend.mem_efficient: SDPBackend.EFFICIENT_ATTENTION,
    Backend.cudnn: SDPBackend.CUDNN_ATTENTION,
    Backend.math: SDPBackend.MATH,
}
"""`attention.backend` -> PyTorch's name for it; None leaves the choice to PyTorch."""

EXPECTED: dict[Backend, frozenset[str]] = {
    Backend.auto: frozenset({"flash", "flash_cpu", "mem_efficient", "cudnn", "math"}),
    Backend.flash: frozenset({"flash", "flash_cpu"}),
    Backend.mem_efficient: frozenset({"mem_efficient"}),
    Backend.cudnn: frozenset({"cudnn"}),
    Backend.math: frozenset({"math"}),
}
"""`attention.backend` -> the kernels of `KernelProbe` that may then run."""

_NO_KERNEL = ("No available kernel", "No viable backend")
"""How torch 2.11 to 2.13 says that no allowed kernel takes these inputs."""


@contextmanager
def pinned_backend(plan: Plan) -> Iterator[None]:
    """Everything inside may use only the planned kernel: forward, evaluation, recomputation.

    PyTorch's switches hold for the whole process, its autograd threads included. A backward pass
    belongs to the kernel that ran forward, so what counts is that recomputation lies inside, too.

    Raises:
        RunError: the kernel does not take this model's inputs; PyTorch warns of its reasons.
    """
    attention = plan.config.attention
    backend = BACKENDS[attention.backend] if attention.option == "sdpa" else None
    if backend is None:
        yield
        return
    with sdpa_kernel(backend):
        try:
            yield
        except RuntimeError as error:
            if not any(sign in str(error) for sign in _NO_KERNEL):
                raise
            why = "PyTorch's kernel does not take this model's inputs; its reasons are in the log"
            raise RunError(
                f"attention.backend = {attention.backend.value}: {why} -> attention.backend=auto"
            ) from error
