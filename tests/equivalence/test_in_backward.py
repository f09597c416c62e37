"""An optimizer that steps within the backward pass trains as one that steps after it."""

import pytest
from equivalence_cases import CASES, RAGGED
from equivalence_compare import largest_difference
from support import TINY
from unit.rules.without import switch_off

from eke.models.sizes import OPTIMIZER_REGISTRY

BASE = (
    *CASES["causal_lm-llama"], *TINY, *RAGGED, "batch.per_device=6", "train.max_grad_norm=null",
    "train.steps=6",
)  # fmt: skip


OPTIMIZERS = sorted(
    o for o, known in OPTIMIZER_REGISTRY.items() if not known.fails_in_backward and o != "custom"
)

FURTHER = {
    "adamw_8bit": ("optimizer.min_8bit_size=1",),  # else no tensor of this model is quantised
    "lion_8bit": ("optimizer.min_8bit_size=1",),
    "paged_adamw_8bit": ("optimizer.min_8bit_size=1",),
    # torchao quantises whole blocks of 4096 numbers or more: here the embeddings and the head.
    "adamw_torchao_8bit": ("optimizer.block_size=64", "train.steps=4"),
    "adamw_torchao_4bit": ("optimizer.block_size=64", "train.steps=4"),
}
QUICK = ("adafactor", "adamw", "muon", "adamw_8bit")
"""What `make test` looks at."""


@pytest.mark.parametrize(
    "optimizer", [o if o in QUICK else pytest.param(o, marks=pytest.mark.slow) for o in OPTIMIZERS]
)
def test_every_allowed_optimizer_steps_identically(optimizer, curve_of) -> None:
    base = (*(o for o in BASE if "optimizer.lr" not in o), f"optimizer={optimizer}")
    base += FURTHER.get(optimizer, ())
    plain, within = curve_of(*base), curve_of(*base, "memory=optimizer_in_backward")
    assert largest_difference(plain, within) == 0.0
    assert plain[0][0] != plain[-1][0], "the loss never moved"


@pytest.mark.slow
def test_step_counts_per_group_are_detected(curve_of, monkeypatch) -> None:
    """Why there is a rule."""
    base = (*BASE, "optimizer=schedule_free")
    plain = curve_of(*base)
    switch_off("in_backward_needs_other_optimizer", monkeypatch)
    within = curve_of(*base, "memory=optimizer_in_backward")
    assert largest_difference(plain, within) > 1e-3
