"""`effective` and its warnings follow what ran, not what was asked for."""

from collections.abc import Callable

import pytest
import torch
from support import last_wins
from trained import train_job

from eke.config.schema import Attention, Backend
from eke.training.loop.training_state import TrainingState
from eke.training.model import attention_kernels
from eke.training.model.attention_kernels import KernelProbe
from eke.training.model.build_model import build_model_and_report
from eke.training.observe.record_settings import expected_kernels

SHORT = ("data=synthetic", "data.seq_len=8", "data.num_samples=8", "train.steps=2",
         "batch.per_device=2", "train.save_final=false")  # fmt: skip

MASKED = ("model=tiny_bert", "task=masked_lm")


@pytest.fixture
def trained(make_plan, tiny, tmp_path) -> Callable[..., TrainingState]:
    """Overrides -> the job after two steps."""

    def run(*overrides: str) -> TrainingState:
        return train_job(make_plan(*last_wins(*tiny, *SHORT, *overrides)), tmp_path)

    return run


def about(job: TrainingState, word: str) -> list[str]:
    return [warning for warning in job.warnings if word in warning]


def test_pinned_kernel_is_detected(trained) -> None:
    job = trained("attention.backend=math")
    assert job.effective["attention_kernels"] == ["math"]
    assert job.effective["attention_implementation"] == "sdpa"
    assert job.effective["loss_kernels"] == ["cross_entropy"]
    assert not about(job, "attention")


def test_unpinned_kernel_is_warned_about(trained, monkeypatch) -> None:
    monkeypatch.setitem(attention_kernels.BACKENDS, Backend.math, None)
    job = trained("attention.backend=math")
    assert job.effective["attention_kernels"] == ["flash_cpu"]
    assert about(job, "flash_cpu")


def test_different_implementation_is_warned_about(trained, monkeypatch) -> None:
    def build_eager(plan, device, parts):
        model, report = build_model_and_report(plan, device, parts)
        model.set_attn_implementation("eager")
        return model, report

    monkeypatch.setattr("eke.training.model.save_model.build_model_and_report", build_eager)
    job = trained("attention=sdpa")
    assert job.effective["attention_kernels"] == ["eager"]
    assert about(job, "attention=sdpa ")


def test_fused_loss_is_detected(trained) -> None:
    job = trained("kernels=fused_linear_cross_entropy")
    assert job.effective["loss_kernels"] == ["linear_cross_entropy"]
    assert not about(job, "fused")


def test_unfused_loss_is_warned_about(trained, monkeypatch) -> None:
    from eke.training.model.loss import from_logits

    monkeypatch.setattr("eke.training.model.save_model.apply_loss", lambda plan, model: None)
    monkeypatch.setattr(
        "eke.training.loop.training_state.build_compiled_loss", lambda *_: from_logits
    )
    job = trained("kernels=fused_linear_cross_entropy")
    assert job.effective["loss_kernels"] == ["cross_entropy"]
    assert about(job, "cross_entropy=true ")


@pytest.mark.slow
def test_projected_positions_are_counted(trained) -> None:
    job = trained(*MASKED, "kernels=sparse_prediction", "data.seq_len=64")
    projected, _, of = job.effective["projected_positions"].partition(" of ")
    assert of == "128"
    assert 1 <= int(projected) < 64
    assert not about(job, "sparse")
    assert "projected_positions" not in trained(*MASKED).effective


def test_ineffective_sparse_prediction_is_warned_about(trained) -> None:
    job = trained(*MASKED, "kernels=sparse_prediction", "task.mask_frac=0.99")
    assert about(job, "kernels.sparse_prediction=true")


@pytest.mark.slow
def test_kernels_in_compiled_code_are_detected(trained) -> None:
    job = trained("compile=aot_eager", "attention.backend=math", "model.num_hidden_layers=1")
    assert job.effective["attention_kernels"] == ["math"]
    assert job.effective["matmul_dtypes"] == ["float32"]
    assert "layer_calls_per_micro_batch" not in job.effective
    assert not about(job, "had no effect")


@pytest.mark.slow
def test_recomputed_random_numbers_in_compiled_code_are_detected(trained) -> None:
    """Recomputed dropout runs within an operator that keeps the generator's state."""
    job = trained(
        "model=tiny_bert", "task=sequence_classification", "compile=aot_eager",
        "memory=checkpointing_selective", "model.dropout=0.1", "attention=eager",
        "model.num_hidden_layers=1",
    )  # fmt: skip
    assert job.effective["attention_kernels"] in ([], ["eager"]), "a compiler may decompose it"
    assert job.effective["matmul_dtypes"] == ["float32"]
    assert not about(job, "had no effect")


def test_operations_in_higher_order_operators_are_detected() -> None:
    from torch._prims.rng_prims import run_and_save_rng_state

    queries = torch.ones(1, 2, 4, 8)
    with KernelProbe() as probe:
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        run_and_save_rng_state(attend, queries, queries, queries)
        run_and_save_rng_state(torch.ops.aten.mm.default, torch.ones(2, 2), torch.ones(2, 2))
    assert (probe.attention_kernels, probe.matmuls.total()) == ({"flash_cpu"}, 1)
    assert probe.matmul_dtypes == ["float32"]


def test_experts_are_not_eager_attention(trained) -> None:
    job = trained("model=tiny_moe", "model.num_local_experts=2")
    assert job.effective["attention_kernels"] == ["flash_cpu"], "the router has a softmax, too"
    assert job.effective["experts_implementation"] == "grouped_mm"
    assert job.effective["matmul_dtypes"] == ["float32"], "offsets of the experts are no factors"
    assert not about(job, "attention")


@pytest.mark.parametrize(
    ("option", "backend", "kernels"),
    [("sdpa", Backend.flash, {"flash", "flash_cpu"}), ("flash2", Backend.auto, {"flash2"})],
    ids=["pinned", "package"],
)
def test_expected_kernels_follow_from_the_option(option, backend, kernels) -> None:
    assert expected_kernels(Attention(option, backend)) == kernels
