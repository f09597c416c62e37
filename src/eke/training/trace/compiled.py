"""torch.compile in a memory trace: inductor's own code, with empty kernels.

The generated Python code allocates and frees memory around its kernels, and runs on fake tensors.
Its own kernels are not compiled, so neither a C++ compiler nor Triton is needed.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor
from torch.fx import GraphModule

from eke.training.trace.fake_device import nothing
from eke.training.trace.fake_gpu import FAKE_GPU

TRACED = ("eager", "aot_eager", "inductor")
"""Options of `compile` that `compile_for_trace` supports."""

_TRUE_COMPILE: Any = torch.compile
_TRUE_GENERATOR = torch.Generator


def compile_for_trace(function: Any = None, backend: str = "inductor", **_: Any) -> Any:
    """Replace `torch.compile`. Every length is compiled separately."""
    if function is None:
        return functools.partial(compile_for_trace, backend=backend)
    chosen = _without_kernels if backend == "inductor" else backend
    return _TRUE_COMPILE(function, backend=chosen, dynamic=False)


def _without_kernels(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    from torch._functorch.config import patch as patch_autograd
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.config import patch as patch_inductor

    whole: Any = compile_fx  # torch 2.13 has the annotations of inductor's inner function
    # Autograd's cache contains code of real runs.
    with patch_autograd(enable_autograd_cache=False), patch_inductor(_SETTINGS):
        return cast(Callable[..., Any], whole(graph, inputs, inner_compile=_compile_graph))


_SETTINGS = {
    "compile_threads": 1,  # more threads would wait in other processes for kernels
    "joint_graph_constant_folding": False,  # computes on the device
    "fx_graph_cache": False,  # contains code of real runs
    "cpp.simdlen": 1,  # vector instructions only change kernels
    "cpp.vec_isa_ok": True,  # otherwise a test program is compiled
}


def _compile_graph(graph: GraphModule, inputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    """Run inductor's own function for the graph of one pass."""
    from torch._inductor import compile_fx, utils
    from torch._inductor.config import patch as patch_inductor

    patches: dict[str, Any] = {
        "torch._inductor.graph.GraphLowering.compile_to_module": _load,
        "torch.Generator": _TRUE_GENERATOR,  # inductor tests for its instances
    }
    if any(isinstance(x, Tensor) and x.device.type == FAKE_GPU for x in inputs):
        _register_gpu()
        wrapper = "torch._inductor.codegen.wrapper.PythonWrapperCodegen"
        patches |= {
            "torch._inductor.utils.GPU_TYPES": [*utils.GPU_TYPES, FAKE_GPU],
            "torch._inductor.fx_passes.post_grad.get_gpu_type": lambda: FAKE_GPU,
            "torch._inductor.compile_fx.get_input_idxs_to_check": lambda *_: (),  # their addresses
            "torch._prims.rng_prims.get_device": lambda *_: "cpu",  # a generator's state
            # Inductor would import Triton and query its version.
            "torch._inductor.scheduler.has_triton": lambda: True,
            "torch.utils._triton.triton_hash_with_backend": lambda: "",
            f"{wrapper}.write_triton_header_once": nothing,
        }
    with ExitStack() as stack:
        for name, stand_in in patches.items():
            stack.enter_context(mock.patch(name, stand_in))
        stack.enter_context(patch_inductor(_SETTINGS))
        return compile_fx.compile_fx_inner(graph, inputs, *args, **kwargs)


def _load(graph: Any) -> SimpleNamespace:
    text, _ = graph.codegen()
    scope: dict[str, Any] = dict(graph.constants)
    compiler = "torch._inductor.async_compile.AsyncCompile"
    with (  # kernels only write into existing memory
        mock.patch(f"{compiler}.cpp_pybinding", return_value=nothing),
        mock.patch(f"{compiler}.triton", return_value=SimpleNamespace(run=nothing)),
    ):
        exec(text.value, scope)
    scope |= CPP_REPLACEMENTS
    return SimpleNamespace(call=scope["call"], runner=scope.get("runner"))


CPP_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "empty_strided_cpu": lambda shape, strides, dtype: torch.empty_strided(
        shape, strides, dtype=dtype, device="cpu"
    ),
    "reinterpret_tensor": lambda tensor, shape, strides, offset=0: tensor.as_strided(
        shape, strides, tensor.storage_offset() + offset
    ),
    "assert_size_stride": nothing,
    "assert_alignment": nothing,
}
"""Replacements of C++ functions that bypass the trace."""


@functools.cache
def _register_gpu() -> None:
    """Register Triton and an H100's processors, which determine how reductions are split."""
    from torch._dynamo.device_interface import CpuInterface, register_interface_for_device
    from torch._inductor.codegen import common
    from torch._inductor.codegen.cpu_device_op_overrides import CpuDeviceOpOverrides
    from torch._inductor.codegen.triton import TritonScheduling
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    properties = SimpleNamespace(
        multi_processor_count=132, max_threads_per_multi_processor=2048, warp_size=32, major=9
    )

    class Interface(CpuInterface):
        @staticmethod
        def get_device_properties(device: Any = None) -> Any:
            return properties

        @staticmethod
        def get_compute_capability(device: Any = None) -> Any:
            return 10 * properties.major

    register_interface_for_device(FAKE_GPU, Interface)
    common.register_device_op_overrides(FAKE_GPU, CpuDeviceOpOverrides())
    common.register_backend_for_device(FAKE_GPU, TritonScheduling, PythonWrapperCodegen)
