"""Kernels of attention and of the loss that only a GPU has: they run, and are the same step.

Each comparison is of short runs with 16-bit operands, whose rounding differs from kernel to kernel:
bfloat16 keeps 8 bits of mantissa, and losses stay within ten times its rounding.
"""

import importlib.util
from collections.abc import Callable

import pytest
from live import record_of, run_folders
from support import last_wins

from eke.record import metrics

pytestmark = pytest.mark.gpu

BASE = (
    "tracker=none",
    "experiment=smoke",
    "model.dropout=0.0",
    "data=synthetic",
    "data.seq_len=128",
    "train.steps=10",
)
RAGGED = ("data.lengths=uniform", "data.min_len=17")
ROUNDING = 10 * 2**-9

AMPERE = pytest.mark.skipif(
    "__import__('torch').cuda.get_device_capability() < (8, 0)"
    " if __import__('torch').cuda.is_available() else False",
    reason="flash and cuDNN kernels need compute capability 8.0",
)


@pytest.fixture
def trained(train_py, tmp_path) -> Callable[..., tuple[dict, list[float]]]:
    """Overrides -> the record, and the loss of each step."""

    def run(*overrides: str) -> tuple[dict, list[float]]:
        before = set(run_folders(tmp_path))
        done = train_py(*last_wins(*BASE, *overrides))
        assert done.code == 0, done.text
        (folder,) = set(run_folders(tmp_path)) - before
        rows, _ = metrics.read_rows(folder / "metrics.jsonl")
        return record_of(folder), [r[metrics.LOSS] for r in metrics.latest(rows, metrics.LOSS)]

    return run


def assert_near(first: list[float], second: list[float]) -> None:
    assert len(first) == len(second) > 0
    assert max(abs(a - b) / a for a, b in zip(first, second, strict=True)) < ROUNDING


@AMPERE
@pytest.mark.parametrize("backend", ["flash", "mem_efficient", "cudnn", "math"])
def test_a_pinned_kernel_runs_and_is_the_same_step(backend, trained) -> None:
    _, eager = trained("precision=bf16", "attention=eager")
    record, losses = trained("precision=bf16", f"attention.backend={backend}")
    assert record["effective"]["attention_kernels"] == [backend]
    assert_near(eager, losses)


def test_the_memory_efficient_kernel_takes_float32_and_masks(trained) -> None:
    masked = (*RAGGED, "model=tiny_bert", "task=masked_lm")
    _, eager = trained(*masked, "attention=eager")
    record, losses = trained(*masked, "attention.backend=mem_efficient")
    assert record["effective"]["attention_kernels"] == ["mem_efficient"]
    assert_near(eager, losses)


@AMPERE
def test_a_pinned_kernel_is_recomputed_in_the_autograd_thread(trained) -> None:
    pinned = ("precision=bf16", "attention.backend=mem_efficient")
    _, kept = trained(*pinned)
    record, recomputed = trained(*pinned, "memory=checkpointing")
    assert record["effective"]["attention_kernels"] == ["mem_efficient"]
    assert_near(kept, recomputed)


@pytest.mark.parametrize("packing", ["off", "on", "padding_free"])
def test_flex_trains_and_keeps_packed_samples_apart(packing, trained) -> None:
    data = (*RAGGED, f"data.packing={packing}")
    _, plain = trained(*data)
    record, losses = trained(*data, "attention=flex")
    assert record["effective"]["attention_kernels"] == ["flex"]
    assert_near(plain, losses)


@AMPERE
@pytest.mark.skipif(
    importlib.util.find_spec("flash_attn") is None, reason="flash-attn is not installed"
)
@pytest.mark.parametrize("packing", ["off", "padding_free"])
def test_flash_attention_2_trains_and_keeps_packed_samples_apart(packing, trained) -> None:
    data = (*RAGGED, "precision=bf16", f"data.packing={packing}")
    _, plain = trained(*data)
    record, losses = trained(*data, "attention=flash2")
    assert record["effective"]["attention_kernels"] == ["flash2"]
    assert_near(plain, losses)


@pytest.mark.skipif(
    importlib.util.find_spec("liger_kernel") is None, reason="liger-kernel is not installed"
)
@pytest.mark.parametrize("model", ["tiny", "tiny_qwen3", "tiny_moe"])
def test_liger_replaces_modules_and_is_the_same_step(model, trained) -> None:
    _, plain = trained(f"model={model}")
    record, losses = trained(f"model={model}", "kernels=liger")
    assert record["effective"]["liger_modules"] > 0
    assert_near(plain, losses)


@pytest.mark.parametrize("precision", ["fp32", "fp16", pytest.param("bf16", marks=AMPERE)])
def test_the_fused_loss_is_the_same_step(precision, trained) -> None:
    plain_record, plain = trained(f"precision={precision}")
    record, losses = trained(f"precision={precision}", "kernels=fused_linear_cross_entropy")
    assert plain_record["effective"]["loss_kernels"] == ["cross_entropy"]
    assert record["effective"]["loss_kernels"] == ["linear_cross_entropy"]
    assert_near(plain, losses)


def test_the_fused_loss_lowers_the_allocators_peak(trained) -> None:
    """4 x 512 tokens x 131072 entries are 1 GiB of float32 logits."""
    large = ("model.vocab_size=131072", "data.seq_len=512", "batch.per_device=4")
    peaks = [
        trained(*large, f"kernels={option}")[0]["memory"]["measured"]["peak_allocated_bytes"]
        for option in ("none", "fused_linear_cross_entropy")
    ]
    assert peaks[0] - peaks[1] > 2**30
