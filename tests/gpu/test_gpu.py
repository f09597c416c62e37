"""What is only true on a GPU: device, formats, allocator peaks, events as clock."""

import pytest
from live import record_of, run_folders
from support import last_wins

pytestmark = pytest.mark.gpu

BASE = ("tracker=none", "experiment=smoke", "data=synthetic", "train.steps=30", "data.seq_len=128")


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("fp32", "float32"),
        ("tf32", "float32"),
        ("fp16", "float16"),
        ("bf16", "bfloat16"),
        ("bf16_pure", "bfloat16"),
        ("fp8", "float8_e4m3fn"),
    ],
    ids=lambda value: value,
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


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "dp"])
@pytest.mark.skipif(
    "__import__('torch').cuda.device_count() < 2", reason="needs two GPUs; one is not two ranks"
)
def test_two_gpus_train_like_one(strategy, train_py, tmp_path) -> None:
    from equivalence_compare import largest_difference

    from eke.record import metrics

    def curve(*overrides: str) -> list[tuple[float, float]]:
        name = f"paths.runs=runs-{len(overrides)}"
        done = train_py(*BASE, "model.dropout=0.0", *overrides, name)
        assert done.code == 0, done.text
        (path,) = (tmp_path / name.partition("=")[2]).glob("*/metrics.jsonl")
        rows = metrics.latest(metrics.read_rows(path)[0], metrics.LOSS)
        return [(row[metrics.LOSS], row["train/grad_norm"]) for row in rows]

    two = curve("batch.per_device=4", f"distributed={strategy}")
    assert largest_difference(curve("batch.per_device=8"), two) < 1e-5


@pytest.mark.skipif("__import__('torch').cuda.device_count() < 2", reason="p2p is between two GPUs")
@pytest.mark.parametrize("p2p", ["auto", "off"])
def test_the_ranks_say_whether_they_may_copy_directly(p2p, train_py, tmp_path) -> None:
    done = train_py(*BASE, "distributed=ddp", f"distributed.p2p={p2p}")
    assert done.code == 0, done.text
    record = record_of(run_folders(tmp_path)[0])
    assert record["effective"]["nccl_p2p"] == [p2p, p2p]


BERT = ("model=bert_base", "task=masked_lm", "data.seq_len=512", "train.max_grad_norm=null")


def measured(train_py, tmp_path, *overrides: str) -> tuple[int, dict]:
    """Peak of the allocator, and what was effective."""
    before = set(run_folders(tmp_path)) if (tmp_path / "runs").exists() else set()
    done = train_py(*last_wins(*BASE, *BERT, *overrides))
    assert done.code == 0, done.text
    (folder,) = set(run_folders(tmp_path)) - before
    record = record_of(folder)
    assert not [w for w in record["warnings"] if "had no effect" in w]
    return record["memory"]["measured"]["peak_allocated_bytes"], record["effective"]


def test_memory_techniques_lower_the_allocators_peak(train_py, tmp_path) -> None:
    plain, _ = measured(train_py, tmp_path)
    offloaded, seen = measured(train_py, tmp_path, "memory=activation_offload")
    assert offloaded < 0.8 * plain
    assert seen["activation_bytes_offloaded"] > plain - offloaded
    selective, seen = measured(train_py, tmp_path, "memory=checkpointing_selective")
    assert selective < plain
    assert seen["matmuls_recomputed_per_micro_batch"] == 0
    everything, seen = measured(train_py, tmp_path, "memory=max_savings")
    assert everything < min(offloaded, selective)
    assert seen["empty_cache_calls"] == 30
    assert seen["optimizer_steps_in_backward"] > 0


@pytest.mark.parametrize(
    "overrides",
    [
        ("memory=activation_offload",),
        ("compile=cudagraphs",),
        ("compile=inductor", "compile.mode=reduce_overhead"),
        ("compile=inductor", "compile.mode=reduce_overhead", "compile.regional=true"),
        ("compile=inductor", "compile.regional=true", "memory=max_savings"),
    ],
    ids=["offload", "cudagraphs", "replayed", "replayed regions", "max_savings"],
)
def test_these_give_the_same_loss_on_a_gpu(overrides, train_py, tmp_path) -> None:
    from equivalence_compare import largest_difference

    from eke.record import metrics

    def curve(*changes: str) -> list[tuple[float, float]]:
        before = set(run_folders(tmp_path)) if (tmp_path / "runs").exists() else set()
        base = (*BASE, "model.dropout=0", "train.max_grad_norm=null", "batch.per_device=4")
        done = train_py(*last_wins(*base, *changes))
        assert done.code == 0, done.text
        (folder,) = set(run_folders(tmp_path)) - before
        rows, _ = metrics.read_rows(folder / "metrics.jsonl")
        steps = metrics.latest(rows, metrics.LOSS)
        return [(row[metrics.LOSS], row["train/grad_norm"]) for row in steps]

    assert largest_difference(curve(), curve(*overrides)) < 1e-4
