"""Number formats: how far from float32, what they save, and that each continues bit for bit."""

import pytest
from equivalence_cases import CASES, RAGGED
from equivalence_compare import largest_difference
from support import TINY, last_wins
from trained import continue_job, steps_of, train_job

STEP = (*CASES["causal_lm-llama"], *TINY, *RAGGED, "batch.per_device=6")


BOUNDS = {
    # bfloat16 rounds to 2^-9, float8 e4m3 to 2^-4; in a loss that is a mean over many products
    # most of it cancels. Ten and one times that, as for bf16 in test_same_mathematics.
    "pure": (("precision=bf16_pure",), 10 * 2**-9),
    "master": (("precision=bf16_pure", "precision.master=on"), 10 * 2**-9),
    "fp8": (("precision=fp8",), 2**-4),
    "fp8-rowwise": (("precision=fp8", "precision.float8=rowwise"), 2**-4),
    "fp8-pure": (("precision=bf16_pure", "precision.float8=tensorwise"), 2**-4),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BOUNDS)
def test_16_bit_formats_stay_near_float32(name, curve_of, baseline_of) -> None:
    overrides, bound = BOUNDS[name]
    if "fp8" in name:
        pytest.importorskip("torchao", reason="an extra")
    base = last_wins(*STEP, "train.steps=24")
    exact, rounded = baseline_of(*base), curve_of(*base, *overrides)
    difference = max(abs(a[0] - b[0]) / a[0] for a, b in zip(exact, rounded, strict=True))
    assert 1e-7 < difference < bound


def test_master_copy_of_float32_weights_is_exact(curve_of, baseline_of, monkeypatch) -> None:
    """The copies themselves are exact: planted on float32 weights, the curve is the same."""
    from eke.training.model.number_formats import build_with_master
    from eke.training.optimizer import builders

    plain = baseline_of(*STEP)
    build, built = builders.adamw, []

    def with_master(plan, groups):
        built.append(build_with_master(groups, lambda g: build(plan, g)))
        return built[-1]

    monkeypatch.setattr(builders, "adamw", with_master)
    assert largest_difference(plain, curve_of(*STEP)) == 0
    assert built


RESUMED = {
    "fp16": ("precision=fp16",),
    "pure": ("precision=bf16_pure",),
    "pure-moe": ("precision=bf16_pure", "model=tiny_moe"),
    "master": ("precision=bf16_pure", "precision.master=on"),
    "adafactor": ("precision=bf16_pure", "optimizer=adafactor"),
    "sgd-master": ("precision=bf16_pure", "precision.master=on", "optimizer=sgd"),
    "fp8": ("precision=fp8",),
}
SAVED = ("train.steps=4", "train.checkpoint_every=2", "train.log_every=1")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n in ("pure-moe", "sgd-master") else n
     for n in RESUMED],
)  # fmt: skip
def test_run_resumes_bit_exact(name, make_plan, tmp_path) -> None:
    if name == "fp8":
        pytest.importorskip("torchao", reason="an extra")
    plan = make_plan(*last_wins(*STEP, *SAVED, *RESUMED[name]))
    whole = train_job(plan, tmp_path / "whole")
    rest = continue_job(whole, 2, tmp_path / "rest")
    assert steps_of(rest) == {n: found for n, found in steps_of(whole).items() if n > 2}


# --- what they save ------------------------------------------------------------------------------

WIDE = (
    *TINY,
    "model.hidden_size=128",
    "model.intermediate_size=256",
    "model.num_hidden_layers=4",
    "model.vocab_size=264",
    "data=synthetic",
    "data.max_token=263",
    "data.seq_len=64",
    "data.num_samples=32",
    "data.num_eval_samples=4",
    "batch.per_device=16",
    "train.steps=2",
    "train.checkpoint_every=null",
    "train.save_final=false",
    "optimizer.lr=3e-3",
)
"""Nearly all memory is activations of the layers."""


@pytest.mark.slow
def test_bfloat16_halves_peak_memory(make_plan, tmp_path) -> None:
    """Autocast leaves norms, the residual stream and the loss in float32; bfloat16 weights make
    all but the loss bfloat16."""
    peaks = {}
    for option in ("fp32", "bf16", "bf16_pure"):
        plan = make_plan(*last_wins(*WIDE, f"precision={option}"))
        peaks[option] = train_job(plan, tmp_path / option).profiled_peak
    assert 0.6 < peaks["bf16"] / peaks["fp32"] < 0.9
    assert 0.4 < peaks["bf16_pure"] / peaks["fp32"] < 0.65
    assert peaks["bf16_pure"] < 0.85 * peaks["bf16"]
