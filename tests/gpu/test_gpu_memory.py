"""Techniques against memory: the same loss at every step, and a lower peak of the allocator."""

import pytest
from equivalence_compare import largest_difference
from on_device import sized

pytestmark = pytest.mark.gpu

LARGE = (
    *sized(
        ("model=bert_base", "data.seq_len=512", "batch.per_device=8"),
        ("model=tiny_bert", "data.seq_len=128", "batch.per_device=4"),
    ),
    "task=masked_lm",
    "train.steps=4",
    "train.max_grad_norm=null",
)
"""Activations outweigh everything else."""

ROUNDING = 1e-4
"""Float32; a GPU adds up an embedding's gradient in another order each time."""

PRESETS = {
    "checkpointing": 0.8,
    "checkpointing_selective": 0.98,
    "activation_offload": 0.8,
    "empty_cache": 1.01,
    "max_savings": 0.7,
}
"""Preset -> its peak is at most this share of the plain run's; emptying the cache frees what the
allocator holds in reserve, and no tensor."""


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_keeps_the_loss_and_lowers_the_peak(preset, trained) -> None:
    plain, saving = trained(*LARGE), trained(*LARGE, f"memory={preset}")
    assert largest_difference(plain.curve, saving.curve) < ROUNDING
    saving.needs_effect()
    assert saving.peak_bytes < PRESETS[preset] * plain.peak_bytes


def test_layers_are_recomputed_as_configured(trained) -> None:
    full, selective = (trained(*LARGE, f"memory=checkpointing{how}") for how in ("", "_selective"))
    layers = full.plan.config.model.num_hidden_layers
    for saving in (full, selective):
        assert saving.effective["layers_recomputed"] == layers
    assert full.effective["matmuls_recomputed_per_micro_batch"] > 0
    assert selective.effective["matmuls_recomputed_per_micro_batch"] == 0


def test_activations_are_offloaded(trained) -> None:
    plain, saving = trained(*LARGE), trained(*LARGE, "memory=activation_offload")
    saving.needs_effect()
    assert saving.effective["activation_bytes_offloaded"] > plain.peak_bytes - saving.peak_bytes


def test_cache_is_emptied_in_each_step(trained) -> None:
    saving = trained(*LARGE, "memory=empty_cache")
    saving.needs_effect()
    assert saving.effective["empty_cache_calls"] == saving.plan.steps.total


def test_gradients_are_freed_after_use(trained) -> None:
    """With so few tokens the peak is weights, gradients and state: all but a few gradients go."""
    short = (*LARGE, "data.seq_len=8", "batch.per_device=1")
    plain, saving = trained(*short), trained(*short, "memory=optimizer_in_backward")
    assert largest_difference(plain.curve, saving.curve) < ROUNDING
    assert saving.effective["optimizer_steps_in_backward"] > 0
    gradients = 4 * plain.plan.size.num_parameters
    assert plain.peak_bytes - saving.peak_bytes > sized(0.5, 0.3) * gradients


@pytest.mark.parametrize("recipe", ["low_memory", "guide_best"])
def test_recipe_lowers_the_memory_peak(recipe, trained) -> None:
    plain, saving = trained(*LARGE), trained(*LARGE, f"recipe={recipe}")
    assert saving.peak_bytes < 0.6 * plain.peak_bytes
    # Adafactor's first step needs no moments: it starts from the very same weights.
    assert saving.losses[0] == pytest.approx(plain.losses[0], rel=2**-8)
