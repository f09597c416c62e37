"""What the record says of number formats is read from the objects, and a lie is found out."""

import math
import warnings
from contextlib import nullcontext

import pytest
import torch
from support import last_wins
from trained import BRIEF, record_of, train_job

from eke.models.sizes import state_bytes


@pytest.fixture
def trained(make_plan, tmp_path):
    """Overrides -> the job after its last step, and its record."""

    def run(*overrides):
        plan = make_plan(*last_wins(*BRIEF, "optimizer.lr=3e-3", *overrides))
        job = train_job(plan, tmp_path / "run")
        return job, record_of(job)

    return run


def no_effect(record):
    """What the warnings say had no effect."""
    words = " had no effect"
    return [warning.split(words)[0] for warning in record.warnings if words in warning]


PURE = "precision=bf16_pure"

STATES = {
    "fp32": (),
    "pure": (PURE,),
    "master": (PURE, "precision.master=on"),
    "adafactor": (PURE, "optimizer=adafactor", "optimizer.lr=3e-3"),
    "sgd-master": (PURE, "optimizer=sgd", "precision.master=on"),
}


@pytest.mark.parametrize("overrides", STATES.values(), ids=STATES.keys())
def test_state_bytes_match_the_plan(overrides, trained) -> None:
    job, record = trained(*overrides)
    expected = state_bytes(job.plan.config)
    weights = list(job.bare_model.parameters())
    assert sum(p.numel() * p.element_size() for p in weights) == expected.weights
    assert record.effective["optimizer_state_bytes"] == expected.optimizer
    assert record.effective.get("master_bytes", 0) == expected.master
    assert record.effective["weight_dtypes"] == [job.plan.compute.weights]
    assert "skipped_steps" not in record.effective, "nothing is scaled"
    job.loss(job.model, next(iter(job.data.eval_batches(0)))).backward()
    gradients = [p.grad for p in weights]
    assert sum(g.numel() * g.element_size() for g in gradients) == expected.gradients
    assert no_effect(record) == []


def test_pure_bfloat16_has_a_float32_norm(trained) -> None:
    job, record = trained(PURE)
    assert record.effective["matmul_dtypes"] == ["bfloat16"]
    assert record.effective["eval_matmul_dtypes"] == ["bfloat16"]
    (row,) = [r for r in record_rows(job) if r["train/global_step"] == 4]
    norm = torch.tensor(row["train/grad_norm"], dtype=torch.float64)
    assert norm.bfloat16().double() != norm, "more digits than bfloat16 has"


def record_rows(job):
    from eke.plan.record import metrics

    return metrics.latest(metrics.read_rows(job.paths.metrics)[0], metrics.LOSS)


def test_float8_layers_are_counted(trained) -> None:
    pytest.importorskip("torchao", reason="an extra")
    _, record = trained("precision=fp8")
    assert record.effective["float8_layers"] == 13
    assert record.effective["linear_layers"] == 15
    assert record.effective["float8_emulated"] is True
    assert no_effect(record) == []


CORRUPTED = {
    "weights": ((PURE,), "model.build_model.base_dtype", lambda plan: torch.float32),
    "master": (
        (PURE, "precision.master=on"),
        "optimizer.build_optimizer.build_with_master",
        lambda groups, build: build(groups),
    ),
    "float8": (("precision=fp8",), "model.build_model.convert_linear_layers", lambda *_: None),
    "evaluation": (
        ("precision=fp32", "precision.evaluation=bfloat16"),
        "model.number_formats._context",
        lambda *_, **__: nullcontext,
    ),
    "compute": (("precision=bf16",), "model.number_formats._context", lambda *_, **__: nullcontext),
}


@pytest.mark.parametrize("what", CORRUPTED)
def test_wrong_builder_is_detected(what, trained, monkeypatch) -> None:
    overrides, target, instead = CORRUPTED[what]
    monkeypatch.setattr(f"eke.training.{target}", instead)
    _, record = trained(*overrides)
    key = f"precision.{what}="
    assert any(warning.startswith(key) for warning in no_effect(record)), record.warnings


def test_evaluation_format_changes_the_loss(trained) -> None:
    _, record = trained("precision=fp32", "precision.evaluation=bfloat16")
    assert record.effective["matmul_dtypes"] == ["float32"]
    assert record.effective["eval_matmul_dtypes"] == ["bfloat16"]


@pytest.mark.parametrize(("exponent", "skipped"), [(10, 0), (127, 4)], ids=["fits", "overflows"])
def test_skipped_steps_are_counted(exponent, skipped, trained, monkeypatch) -> None:
    """float16 ends at 2^16: scaled by 2^127, gradients overflow in each of four steps."""
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda device: scaler(device, 2.0**exponent))
    job, record = trained("precision=fp16")
    assert record.effective["skipped_steps"] == skipped
    assert record.effective["loss_scale"] == 2.0 ** (exponent - skipped)
    assert any("steps were skipped" in warning for warning in record.warnings) == (skipped > 2)
    norms = [row["train/grad_norm"] for row in record_rows(job)]
    assert sum(not math.isfinite(norm) for norm in norms) == skipped


# --- what the rules are for ----------------------------------------------------------------------


@pytest.mark.parametrize(("master", "moved"), [("off", False), ("on", True)])
def test_16_bit_norms_do_not_change_with_small_updates(master, moved, trained) -> None:
    """Rule small_updates_are_lost: at a learning rate of 1e-3 no bfloat16 weight of 1 moves."""
    job, _ = trained(PURE, "optimizer.lr=1e-3", f"precision.master={master}", "train.steps=8")
    norms = [p for name, p in job.bare_model.named_parameters() if "norm" in name]
    assert norms
    assert any(not torch.all(p == 1) for p in norms) == moved


@pytest.fixture
def unchecked(monkeypatch):
    """No rule is asked."""
    monkeypatch.setattr("eke.workflows.auto_batch.check", lambda facts: ([], []))


@pytest.mark.parametrize("key", ["compute", "evaluation"])
def test_bfloat16_weights_ignore_a_wider_compute_format(key, trained, unchecked) -> None:
    """Autocast does not widen them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="In CPU autocast", category=UserWarning)
        _, record = trained(PURE, f"precision.{key}=float32")
    assert record.effective["matmul_dtypes"] == ["bfloat16"]
    assert record.effective["eval_matmul_dtypes"] == ["bfloat16"]
    assert no_effect(record)


@pytest.mark.parametrize(
    "model", [("model=tiny_gpt2",), ("model.hidden_size=40", "model.intermediate_size=64")]
)
def test_disabled_rules_give_no_float8_layers(model, trained, unchecked) -> None:
    """GPT-2 has no linear layers; a width that is no multiple of 16 has no product."""
    pytest.importorskip("torchao", reason="an extra")
    _, record = trained("precision=fp8", *model)
    assert no_effect(record) == ["precision.float8=tensorwise"]


def test_float16_overflows_where_bfloat16_does_not() -> None:
    """Rule t5_overflows_float16: an activation beyond 65504, as T5's checkpoints have them."""
    layer = torch.nn.Linear(8, 8, bias=False)
    torch.nn.init.constant_(layer.weight, 1e4)
    finite = {}
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype=dtype):
            finite[dtype] = bool(layer(torch.full((1, 8), 10.0)).isfinite().all())
    assert finite == {torch.float16: False, torch.bfloat16: True}
