"""Recipes by the command a user types, on this machine's CPU."""

import json

import pytest
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
def test_a_recipe_trains_and_its_record_says_why(recipe, train_py, tmp_path) -> None:
    typed = SHORT if recipe != "low_memory" else (*SHORT, "batch.per_device=2")
    done = train_py(f"recipe={recipe}", *typed)
    assert done.code == 0, done.text
    assert f"recipe={recipe}: " in done.out
    (file,) = tmp_path.glob("runs/*/record.json")
    decisions = json.loads(file.read_text())["plan"]["decisions"]
    reasons = [d["reason"] for d in decisions if d["reason"].startswith("recipe=")]
    assert any(d["key"] == "precision" for d in decisions)
    assert reasons
