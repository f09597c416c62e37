"""A recipe decides what nobody else has; and the run is the one of the options it comes to."""

import pytest
from recipe_plans import BERT, LLAMA, LONG, SEVEN, chosen, planned, said

from eke.common.errors import ConfigError
from eke.config.sweep import expand
from eke.tuning.recipes import RECIPES


@pytest.mark.parametrize(
    ("recipe", "typed", "group", "option"),
    [
        ("fastest", "precision=fp32", "precision", "fp32"),
        ("fastest", "precision.compute=float16", "precision", "fp32"),
        ("fastest", "attention=eager", "attention", "eager"),
        ("fastest", "compile=none", "compile", "none"),
        ("fastest", "batch.per_device=2", "batch", "fixed"),
        ("fastest", "kernels=none", "kernels", "none"),
        ("low_memory", "optimizer=sgd", "optimizer", "sgd"),
        ("low_memory", "memory=none", "memory", "none"),
        ("large_model_one_gpu", "memory=checkpointing", "memory", "checkpointing"),
        ("large_model_one_gpu", "optimizer=adafactor", "optimizer", "adafactor"),
    ],
)
def test_explicit_option_overrides_the_recipe(recipe, typed, group, option) -> None:
    plan = planned(f"recipe={recipe}", *LLAMA, typed, LONG, "hardware=h100")
    assert plan.choices[group] == option
    assert group not in chosen(plan)


@pytest.mark.slow
def test_keys_of_an_open_group_are_kept() -> None:
    plan = planned("recipe=fastest", *BERT, "compile.mode=max_autotune", LONG, "hardware=h200")
    assert plan.choices["compile"] == "inductor"
    assert plan.config.compile.mode.value == "max_autotune"
    assert not plan.config.compile.regional, "graphs take the whole model"
    plan = planned("recipe=low_memory", *BERT, "optimizer.lr=0.5", "hardware=v100_16")
    assert plan.choices["optimizer"] == "adafactor"
    assert plan.config.optimizer.lr == 0.5


@pytest.mark.slow
def test_optimizer_without_an_explicit_key_is_skipped(packages) -> None:
    packages("bitsandbytes", "torchao")
    plan = planned("recipe=low_memory", *BERT, "optimizer.beta1=0.5", "hardware=v100_16")
    assert plan.choices["optimizer"] in ("adamw_8bit", "adamw_torchao_8bit")
    assert plan.config.optimizer.beta1 == 0.5
    reason = said(plan, "optimizer").reason
    assert "not optimizer=adafactor: it conflicts with the overrides" in reason


@pytest.mark.slow
def test_user_experiment_overrides_the_recipe(tmp_path) -> None:
    """It may name the recipe, too, and builds on others."""
    from eke.config.compose import compose
    from eke.workflows.planning import plan_for

    folder = tmp_path / "own" / "experiment"
    folder.mkdir(parents=True)
    base = "# @package _global_\n# base -- one.\ndefaults:\n  - override /attention: eager\n"
    (folder / "base.yaml").write_text(base)
    text = (
        "# @package _global_\n# mine -- one.\ndefaults:\n  - base\n  - override /recipe: fastest\n"
        "  - _self_\ncompile:\n  mode: default\nbatch:\n  per_device: 2\n"
    )
    (folder / "mine.yaml").write_text(text)
    asked = compose(["experiment=mine", "hardware=h100", "tracker=none"], folder.parent)
    plan = plan_for(asked, planning=True)
    assert plan.choices["recipe"] == "fastest"
    assert plan.choices["precision"] == "bf16"
    assert plan.choices["attention"] == "eager"
    assert plan.batch.per_device == 2


@pytest.mark.slow
def test_sweep_row_overrides_the_recipe() -> None:
    from eke.workflows.planning import plan_for

    typed = ("sweep=precision_ladder", "recipe=fastest", "hardware=h100", "tracker=none")
    plans = {c.row: plan_for(c.composed, planning=True) for c in expand(typed).cells}
    assert {row: plan.choices["precision"] for row, plan in plans.items() if row != "fp8"} == {
        row: plan.config.precision.option for row, plan in plans.items() if row != "fp8"
    }
    assert plans["fp32"].choices["precision"] == "fp32"
    assert plans["bf16"].choices["batch"] == "auto", "the sweep's own batch is none of its rows"


@pytest.mark.slow
def test_sweep_over_recipes() -> None:
    from eke.workflows.planning import plan_for

    cells = expand(("recipe=none,fastest", *BERT, "hardware=h100", "tracker=none")).cells
    plans = [plan_for(cell.composed, planning=True) for cell in cells]
    assert [plan.choices["precision"] for plan in plans] == ["fp32", "bf16"]
    assert plans[0].run_id != plans[1].run_id


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(("recipe=fastest", *LLAMA, "hardware=h100", LONG), id="fastest"),
        pytest.param(
            ("recipe=fastest", *BERT, "batch.target=4", "hardware=h200", LONG), id="graphs"
        ),
        pytest.param(("recipe=low_memory", *LLAMA, "hardware=v100_16"), id="low_memory"),
        pytest.param(("recipe=large_model_one_gpu", *SEVEN, "hardware=h100"), id="large"),
        pytest.param(("recipe=fastest", "hardware=cpu"), id="cpu"),
    ],
)
def test_equivalent_options_are_the_same_run(asked) -> None:
    by_recipe = planned(*asked)
    choices = chosen(by_recipe)
    choices.pop("memory forecast", None)
    typed = [f"{key}={value}" for key, value in choices.items()]
    assert typed
    by_hand = planned(*asked[1:], *typed)
    assert by_hand.run_id == by_recipe.run_id
    assert by_hand.config == by_recipe.config
    assert {**by_hand.choices, "recipe": ""} == {**by_recipe.choices, "recipe": ""}


def test_invalid_override_has_the_same_error_with_a_recipe() -> None:
    wrong = ("model.num_attention_heads=3", "hardware=h100")
    with pytest.raises(ConfigError) as plain:
        planned(*wrong)
    for recipe in RECIPES:
        with pytest.raises(ConfigError) as adapted:
            planned(f"recipe={recipe}", *wrong)
        assert str(adapted.value) == str(plain.value)


def test_option_that_depends_on_the_recipe_is_accepted(packages) -> None:
    """FlashAttention wants 16 bits, and four samples want another micro-batch than eight."""
    packages("flash_attn")
    plan = planned("recipe=fastest", *LLAMA, "attention=flash2", "hardware=a100_80")
    assert (plan.choices["attention"], plan.choices["precision"]) == ("flash2", "bf16")
    plan = planned("recipe=fastest", *BERT, "batch.target=4", "hardware=h200")
    assert plan.batch.per_device == 4


@pytest.mark.slow
def test_recipe_respects_engine_trainer() -> None:
    plain = planned(*BERT, "engine=trainer", "hardware=h100")
    for recipe in RECIPES:
        plan = planned(f"recipe={recipe}", *BERT, "engine=trainer", "hardware=h100")
        assert plan.choices["engine"] == "trainer"
        assert plan.warnings == plain.warnings or "vocab_size" in "".join(plan.warnings)
