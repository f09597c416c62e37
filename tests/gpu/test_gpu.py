"""What is only true on a GPU: device, formats, allocator peaks, events as clock."""

import pytest
from live import record_of, run_folders
from support import last_wins

pytestmark = pytest.mark.gpu

BASE = ("tracker=none", "experiment=smoke", "data=synthetic", "train.steps=30", "data.seq_len=128")


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", "float32"), ("tf32", "float32"), ("fp16", "float16"), ("bf16", "bfloat16")],
    ids=["fp32", "tf32", "fp16", "bf16"],
)
def test_formats_are_real(precision, dtype, train_py, tmp_path) -> None:
    done = train_py(*BASE, f"precision={precision}")
    assert done.code == 0, done.text
    record = record_of(run_folders(tmp_path)[0])
    assert record["effective"]["device"].startswith("cuda")
    assert dtype in record["effective"]["matmul_dtypes"]
    memory = record["memory"]["measured"]
    assert memory["peak_reserved_bytes"] >= memory["peak_allocated_bytes"] > 0
    stages = memory["stages"]
    assert stages["empty"] <= stages["kernels_loaded"] <= stages["weights"]
    assert record["timing"]["steady_step_s"]["median"] > 0
    phases = record["timing"]["phases"]
    assert set(phases) == {"data", "forward", "backward", "optimizer"}


def test_checkpointing_lowers_the_allocators_peak(train_py, tmp_path) -> None:
    base = last_wins(*BASE, "model=bert_base", "task=masked_lm", "data.seq_len=512")
    assert train_py(*base).code == 0
    assert train_py(*base, "memory=checkpointing").code == 0
    plain, recomputed = (
        record_of(f)["memory"]["measured"]["peak_allocated_bytes"] for f in run_folders(tmp_path)
    )
    assert recomputed < 0.8 * plain


def test_a_batch_that_cannot_fit_is_an_outcome(train_py, tmp_path) -> None:
    huge = last_wins(*BASE, "model=bert_large", "task=masked_lm", "batch.per_device=65536")
    done = train_py(*last_wins(*huge, "data.seq_len=512", "data.num_samples=65536"))
    assert done.code == 1, done.text
    record = record_of(run_folders(tmp_path)[0])
    assert record["outcome"] == "oom"
    assert record["failure"]["phase"] in ("forward", "backward", "eval")
    assert "Traceback" not in done.text
