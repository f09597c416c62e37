"""What PyTorch's kernels refuse on a GPU, as the rules of attention and float8 say it."""

import pytest
import torch
import torch.nn.functional as F
from on_device import ON
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
        (CUDNN, HALF, 64, {"dropout_p": 0.1}, {"dropout_p": 0.125}),
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
def test_a_kernel_that_was_pinned_refuses(backend, dtype, width, more, allowed) -> None:
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
def test_an_older_gpu_has_no_flash_kernel() -> None:
    with pytest.raises(RuntimeError, match=r"No available kernel|No viable backend"):
        attend(FLASH, torch.float16, 64)


@pytest.mark.skipif(
    "__import__('torch').cuda.get_device_capability() < (8, 9)"
    " if __import__('torch').cuda.is_available() else False",
    reason="float8 products need compute capability 8.9",
)
@pytest.mark.parametrize("refused", [torch.float16, torch.float32], ids=str)
def test_products_with_a_scale_per_row_are_bfloat16(refused) -> None:
    """Where this fails, the rule refuses what works: PyTorch widens it from version to version."""
    left = torch.ones(16, 16, device="cuda").to(torch.float8_e4m3fn)
    right = torch.ones(16, 16, device="cuda").to(torch.float8_e4m3fn).t()
    scales = torch.ones(16, 1, device="cuda"), torch.ones(1, 16, device="cuda")

    def multiply(dtype: torch.dtype) -> torch.Tensor:
        return torch._scaled_mm(left, right, *scales, out_dtype=dtype)

    assert (multiply(torch.bfloat16) == 16).all()
    with pytest.raises((RuntimeError, ValueError), match="row-wise"):
        multiply(refused)


def test_triton_needs_a_compiler_of_c(monkeypatch) -> None:
    """For its driver, at first use: by hand, triton 3.9 on a CPU says the same."""
    build = pytest.importorskip("triton.runtime.build", reason="comes with torch for CUDA")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(RuntimeError, match="Failed to find C compiler"):
        build._find_compiler("c")
