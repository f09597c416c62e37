"""Kernels of attention and of the loss that only a GPU has: they run, and are the same step.

Each comparison is of short runs with 16-bit operands, whose rounding differs from kernel to kernel:
bfloat16 keeps 8 bits of mantissa, and losses stay within ten times its rounding.
"""

import pytest
from on_device import Trained, sized

pytestmark = pytest.mark.gpu

RAGGED = ("data.lengths=uniform", "data.min_len=17")
ROUNDING = 10 * 2**-9


def assert_near(first: Trained, second: Trained) -> None:
    assert len(first.losses) == len(second.losses) > 0
    pairs = zip(first.losses, second.losses, strict=True)
    assert max(abs(a - b) / a for a, b in pairs) < ROUNDING


@pytest.mark.parametrize("backend", ["flash", "mem_efficient", "cudnn", "math"])
def test_pinned_kernel_computes_the_same_step(backend, trained) -> None:
    pinned = trained("precision=bf16", f"attention.backend={backend}")
    kernel = sized(backend, {"flash": "flash_cpu"}.get(backend, backend))
    assert pinned.effective["attention_kernels"] == [kernel]
    assert_near(trained("precision=bf16", "attention=eager"), pinned)


def test_memory_efficient_kernel_takes_float32_and_masks(trained) -> None:
    masked = (*RAGGED, "model=tiny_bert", "task=masked_lm")
    pinned = trained(*masked, "attention.backend=mem_efficient")
    assert pinned.effective["attention_kernels"] == ["mem_efficient"]
    assert_near(trained(*masked, "attention=eager"), pinned)


@pytest.mark.parametrize("backend", ["mem_efficient", "math"])
def test_pinned_kernel_is_recomputed_in_the_autograd_thread(backend, trained) -> None:
    pinned = ("precision=bf16", f"attention.backend={backend}")
    recomputed = trained(*pinned, "memory=checkpointing")
    assert recomputed.effective["attention_kernels"] == [backend]
    assert_near(trained(*pinned), recomputed)


@pytest.mark.parametrize("packing", ["off", "on", "padding_free"])
def test_flex_separates_packed_samples(packing, trained) -> None:
    data = (*RAGGED, f"data.packing={packing}")
    flex = trained(*data, "attention=flex")
    assert flex.effective["attention_kernels"] == ["flex"]
    assert_near(trained(*data), flex)


@pytest.mark.parametrize("packing", ["off", "padding_free"])
@pytest.mark.parametrize("package", ["flash2", "flash3"])
def test_flash_attention_separates_packed_samples(package, packing, trained) -> None:
    data = (*RAGGED, "precision=bf16", f"data.packing={packing}")
    flash = trained(*data, f"attention={package}")
    assert flash.effective["attention_kernels"] == [package]
    assert_near(trained(*data), flash)


@pytest.mark.parametrize("model", ["tiny", "tiny_qwen3", "tiny_moe"])
def test_liger_replaces_modules_and_computes_the_same_step(model, trained) -> None:
    liger = trained(f"model={model}", "kernels=liger")
    assert liger.effective["liger_modules"] > 0
    assert_near(trained(f"model={model}"), liger)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_fused_loss_computes_the_same_step(precision, trained) -> None:
    fused = trained(f"precision={precision}", "kernels=fused_linear_cross_entropy")
    plain = trained(f"precision={precision}")
    assert fused.effective["loss_kernels"] == ["linear_cross_entropy"]
    assert plain.effective["loss_kernels"] == ["cross_entropy"]
    assert_near(plain, fused)


def test_fused_loss_lowers_the_peak_by_the_logits(trained) -> None:
    """4 x 512 tokens x 131072 entries are 1 GiB of float32 logits; on a CPU 128 MiB. Two chunks."""
    vocabulary, length = sized(131072, 16384), 512
    large = (f"model.vocab_size={vocabulary}", f"data.seq_len={length}", "train.steps=4")
    fused = trained(*large, "kernels=fused_linear_cross_entropy")
    assert trained(*large).peak_bytes - fused.peak_bytes > 4 * length * vocabulary * 4
