"""Recipes by the command a user types, on this machine's CPU."""

import pytest
from live import record_of
from support import TINY

from eke.tuning.recipes import RECIPES

SHORT = (
    *TINY,
    "data=synthetic",
    "data.seq_len=16",
    "data.num_samples=32",
    "data.num_eval_samples=4",
    "batch.target=4",
    "train.steps=2",
    "train.checkpoint_every=null",
    "hardware=cpu",
)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_trains_and_records_its_reasons(recipe, train_ranks) -> None:
    typed = SHORT if recipe != "low_memory" else (*SHORT, "batch.per_device=2")
    record = record_of(train_ranks(f"recipe={recipe}", *typed))
    decisions = record["plan"]["decisions"]
    assert any(d["key"] == "precision" for d in decisions)
    assert any(d["reason"].startswith(f"recipe={recipe}: ") for d in decisions)
