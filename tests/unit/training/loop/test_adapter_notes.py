"""What the record says of adapters is read from the modules; what did not happen is told."""

import pytest
from equivalence_cases import RAGGED
from support import TINY, last_wins

from eke.training.model import adapters

BASE = (*TINY, *RAGGED, "batch.per_device=6", "train.steps=2", "peft=lora")


@pytest.fixture
def job_of(make_plan, tmp_path):
    """Overrides -> the job after its training."""
    from trained import train_job

    def run(*overrides, folder=tmp_path):
        return train_job(make_plan(*last_wins(*BASE, *overrides)), folder)

    return run


@pytest.mark.parametrize("method", ["lora", "dora", "qlora", "ia3"])
def test_effective_peft_describes_the_modules(method, job_of) -> None:
    job = job_of(f"peft={method}")
    found = job.effective["peft"]
    assert job.warnings == []
    assert found["adapted_modules"] == (2 * 3 if method == "ia3" else 2 * 7)
    assert found["trained_parameters"] == job.plan.size.num_trained_parameters
    assert found["magnitude_vectors"] == (14 if method == "dora" else 0)
    assert found["four_bit_tensors"] == (14 if method == "qlora" else 0)
    assert found["four_bit_type"] == ("nf4" if method == "qlora" else "")
    assert 0 < found["trained_frac"] < 0.5


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_master_copy_optimizer_includes_adapters(optimizer, job_of) -> None:
    job = job_of("precision=bf16_pure", "precision.master=on", f"optimizer={optimizer}")
    assert not [warning for warning in job.warnings if "adapters" in warning]


def test_adapters_missing_from_the_optimizer_are_reported(job_of, monkeypatch) -> None:
    monkeypatch.setattr("eke.training.observe.observe_run.optimized_weights", lambda optimizer: [])
    job = job_of("precision=bf16_pure", "precision.master=on")
    assert any("28 adapters" in w for w in job.warnings)


def test_model_without_adapters_has_no_peft_entry(job_of) -> None:
    job = job_of("peft=none")
    assert "peft" not in job.effective
    assert job.warnings == []


def test_missing_adapter_is_reported(job_of, monkeypatch) -> None:
    monkeypatch.setitem(adapters.BUILDERS, "lora", None)
    job = job_of()
    assert job.effective["peft"] == {}
    assert any("peft=lora did not take effect: the model has none" in w for w in job.warnings)


def test_wrong_adapter_method_is_reported(job_of, monkeypatch) -> None:
    def dora(plan, names, targets):
        config = adapters._lora(plan, names, targets)
        config.use_dora = True
        return config

    monkeypatch.setitem(adapters.BUILDERS, "lora", dora)
    job = job_of()
    assert job.effective["peft"]["magnitude_vectors"] == 14
    assert any("dora" in w for w in job.warnings)


def test_unquantized_qlora_weights_are_reported(job_of, monkeypatch) -> None:
    monkeypatch.setattr("eke.training.model.build_model.quantise", lambda _, model, *__: model)
    job = job_of("peft=qlora")
    assert job.effective["peft"]["four_bit_tensors"] == 0
    assert any("peft=qlora" in w for w in job.warnings)


@pytest.mark.slow
def test_run_resumes_bit_exact_from_adapters(job_of, tmp_path) -> None:
    from eke.plan.record import metrics

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    more = ("train.steps=4", "schedule=constant", "peft.dropout=0.1", "train.checkpoint_every=2")
    job_of(*more, folder=whole)
    job_of(*last_wins(*more, "train.steps=2", "train.save_final=true"), folder=cut)
    job_of(*more, folder=cut)
    rows = [metrics.read_rows(f / "metrics.jsonl")[0] for f in (whole, cut)]
    one, other = (metrics.latest(r, metrics.LOSS) for r in rows)
    assert [r[metrics.LOSS] for r in one] == [r[metrics.LOSS] for r in other]
    assert [r["train/grad_norm"] for r in one] == [r["train/grad_norm"] for r in other]
