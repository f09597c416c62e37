"""An optimizer that steps within the backward pass trains as one that steps after it."""

import pytest
from equivalence_cases import CASES, RAGGED
from equivalence_compare import largest_difference
from support import TINY

from eke.check.rules_memory import IN_BACKWARD
from eke.compose.catalogue import make_catalogue

BASE = (
    *CASES["causal_lm-llama"], *TINY, *RAGGED, "batch.per_device=6", "train.max_grad_norm=null",
)  # fmt: skip


def test_only_optimizers_that_exist_are_allowed() -> None:
    assert set(IN_BACKWARD) <= set(make_catalogue().options["optimizer"])


@pytest.mark.parametrize("optimizer", IN_BACKWARD)
def test_every_allowed_optimizer_steps_alike(optimizer, curve_of) -> None:
    base = (*(o for o in BASE if "optimizer.lr" not in o), f"optimizer={optimizer}")
    plain, within = curve_of(*base), curve_of(*base, "memory=optimizer_in_backward")
    assert largest_difference(plain, within) == 0.0
    assert plain[0][0] != plain[-1][0], "the loss never moved"
