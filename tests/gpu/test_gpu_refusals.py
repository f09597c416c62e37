"""What PyTorch refuses on a GPU, as the rules of attention, float8 and compilation say it."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from on_device import ON
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def cuda() -> None:
    """These ask CUDA's own kernels."""
    if ON == "cpu":
        pytest.skip("a CPU has none of these kernels")


FLASH, CUDNN = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
EFFICIENT = SDPBackend.EFFICIENT_ATTENTION
HALF = torch.bfloat16

AMPERE = pytest.mark.skipif(
    "__import__('torch').cuda.get_device_capability() < (8, 0)"
    " if __import__('torch').cuda.is_available() else False",
    reason="flash and cuDNN kernels need compute capability 8.0",
)

CHECKS_DROPOUT = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="torch 2.11 does not check it, and 2.12 was not looked at"
)


def attend(backend: SDPBackend, dtype: torch.dtype, width: int, **more: object) -> torch.Tensor:
    """Attention of two heads over 64 tokens in one kernel and no other."""
    query = torch.randn(1, 2, 64, width, device="cuda", dtype=dtype, requires_grad=True)
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(query, query, query, **more)


@AMPERE
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch 2.13 warns of a kernel's reasons
@pytest.mark.parametrize(
    ("backend", "dtype", "width", "more", "allowed"),
    [
        (FLASH, HALF, 64, {"attn_mask": True}, {}),
        (FLASH, torch.float32, 64, {}, None),
        (CUDNN, torch.float32, 64, {}, None),
        (FLASH, HALF, 264, {}, None),
        (CUDNN, HALF, 264, {}, None),
        (CUDNN, HALF, 60, {}, None),
        (EFFICIENT, HALF, 60, {}, None),
        (EFFICIENT, torch.float32, 62, {}, None),
        pytest.param(
            CUDNN, HALF, 64, {"dropout_p": 0.1}, {"dropout_p": 0.125}, marks=CHECKS_DROPOUT
        ),
    ],
    ids=[
        "flash_takes_no_mask",
        "kernel_needs_16_bits: flash",
        "kernel_needs_16_bits: cudnn",
        "kernel_head_is_narrow: flash",
        "kernel_head_is_narrow: cudnn",
        "kernel_head_is_aligned: cudnn",
        "kernel_head_is_aligned: mem_efficient",
        "kernel_head_is_aligned: mem_efficient in float32",
        "cudnn_dropout_in_sixteenths",
    ],
)
def test_unsupported_pinned_kernel_fails(backend, dtype, width, more, allowed) -> None:
    if more.get("attn_mask"):
        more = {"attn_mask": torch.ones(64, 64, device="cuda", dtype=torch.bool).tril()}
    with pytest.raises(RuntimeError, match=r"No available kernel|No viable backend|cudnn|cuDNN"):
        attend(backend, dtype, width, **more).sum().backward()
    if allowed is not None:
        attend(backend, dtype, width, **allowed).sum().backward()


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch 2.13 warns of a kernel's reasons
@pytest.mark.skipif(
    "__import__('torch').cuda.get_device_capability() >= (8, 0)"
    " if __import__('torch').cuda.is_available() else False",
    reason="needs a GPU older than Ampere",
)
def test_older_gpu_has_no_flash_kernel() -> None:
    with pytest.raises(RuntimeError, match=r"No available kernel|No viable backend"):
        attend(FLASH, torch.float16, 64)


@pytest.mark.skipif(
    "__import__('torch').cuda.get_device_capability() < (8, 9)"
    " if __import__('torch').cuda.is_available() else False",
    reason="float8 products need compute capability 8.9",
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_row_scaled_float8_products_are_bfloat16(dtype) -> None:
    """torchao's are, though cuBLAS has others on a Hopper since CUDA 12.9."""
    ops = pytest.importorskip("torchao.float8.float8_ops", reason="an extra")
    left, right = (torch.randn(16, 16, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    scales = torch.ones(16, 1, device="cuda"), torch.ones(1, 16, device="cuda")
    found = ops.addmm_float8_unwrapped(
        left, scales[0], right.t(), scales[1], output_dtype=dtype, use_fast_accum=True
    )
    assert found.dtype == dtype
    assert torch.equal(found, found.bfloat16().to(dtype))


TAKEN = "CUDAGraphs that has been overwritten by a subsequent run"


@pytest.fixture
def replayed() -> Iterator[Callable[[nn.Module], nn.Module]]:
    """Compiles for graphs; the process forgets them afterwards."""
    torch._dynamo.reset()
    yield lambda module: torch.compile(module.cuda(), mode="reduce-overhead")
    torch._dynamo.reset()


def test_gradients_inside_cuda_graphs_do_not_accumulate(replayed) -> None:
    """pytorch#169545. Where this fails, the rule refuses what works."""
    model = replayed(nn.Linear(16, 16))
    rows = torch.randn(4, 16, device="cuda")

    def accumulate() -> None:
        for _ in range(4):  # a warm-up, a recording, and replays
            model(rows).sum().backward()

    with pytest.raises(RuntimeError, match=TAKEN):
        accumulate()


def test_cuda_graph_output_is_overwritten_by_the_next_layer(replayed) -> None:
    """pytorch#152887. Where this fails, the rule refuses what works."""
    layers = nn.Sequential(*(replayed(nn.Linear(16, 16)) for _ in range(3)))
    rows = torch.randn(4, 16, device="cuda")

    def evaluate() -> None:
        for _ in range(4):
            layers(rows).sum().item()

    with torch.no_grad(), pytest.raises(RuntimeError, match=TAKEN):
        evaluate()


def test_triton_requires_a_c_compiler(monkeypatch) -> None:
    """For its driver, at first use: by hand, triton 3.9 on a CPU says the same."""
    build = pytest.importorskip("triton.runtime.build", reason="comes with torch for CUDA")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(RuntimeError, match="Failed to find C compiler"):
        build.compile_module_from_src("int nothing;", "no_compiler")
