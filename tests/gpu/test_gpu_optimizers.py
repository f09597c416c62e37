"""Every optimizer trains on the device, keeps the state it says, and where the device has it."""

import pytest
from equivalence_compare import largest_difference

from eke.config.compose.catalogue import make_catalogue
from eke.models.sizes import state_bytes

pytestmark = pytest.mark.gpu

WIDE = ("model.hidden_size=512", "model.intermediate_size=1024")
"""Tensors of 100000 numbers and more are paged: these have 512 x 1024."""

BESIDE = {
    "adamw_bf16_sr": ("precision=bf16_pure",),
    "paged_adamw_8bit": WIDE,
    "schedule_free": ("schedule=constant",),
}
"""What an optimizer needs beside itself."""

SAME = ("train.steps=10", "data.num_samples=4")
"""The same four samples in each step: whatever trains, learns them."""


@pytest.mark.parametrize("option", sorted(make_catalogue().options["optimizer"]))
def test_optimizer_lowers_the_loss_with_predicted_state_bytes(option, trained) -> None:
    done = trained(f"optimizer={option}", *SAME, *BESIDE.get(option, ()))
    assert done.losses[-1] < done.losses[0]
    expected = state_bytes(done.plan.config).optimizer
    assert done.effective["optimizer_state_bytes"] == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("option", ["adamw_forloop", "adamw_foreach", "adamw_apex_fused"])
def test_implementations_of_adamw_agree(option, trained) -> None:
    fused, other = (trained(f"optimizer={name}") for name in ("adamw_fused", option))
    assert largest_difference(fused.curve, other.curve) < 1e-4


def test_paged_state_matches_the_unpaged_state(trained) -> None:
    kept, paged = (trained(*WIDE, f"optimizer={name}adamw_8bit") for name in ("", "paged_"))
    assert largest_difference(kept.curve, paged.curve) < 1e-4
    assert kept.effective["optimizer_paged_bytes"] == 0
    paged.needs_effect()
    assert paged.effective["optimizer_paged_bytes"] > 0
    assert paged.peak_bytes < kept.peak_bytes
