"""Values put into a kept tree give what Hydra gives when it composes everything at once."""

import hydra
import omegaconf
import pytest
from omegaconf import OmegaConf, open_dict, read_write

from eke.config.compose import compose
from eke.config.compose.catalogue import make_catalogue
from eke.config.compose.compose_cache import (
    ComposeCache,
    RejectedValues,
    hydra_state,
    is_self_contained,
    make_trees,
    to_hydra_override,
)
from eke.config.schema import model

CATALOGUE = make_catalogue()


def all_at_once(*overrides: str):
    """Hydra's own composition: its tree without its own part, its choices."""
    taken = [to_hydra_override(text, CATALOGUE) for text in overrides]
    with hydra_state():
        tree = hydra.compose("config", taken, return_hydra_config=True)
    choices = {k: v for k, v in tree.hydra.runtime.choices.items() if not k.startswith("hydra/")}
    with read_write(tree), open_dict(tree):
        del tree["hydra"]
    return tree, choices


def described(tree) -> list[tuple]:
    """Every node: its key, its type, its value as written, its flags."""
    nodes = [("", tree)]
    found = []
    while nodes:
        path, node = nodes.pop()
        found.append((path, type(node), node._metadata.ref_type, node._metadata.object_type,
                      node._metadata.flags))  # fmt: skip
        if OmegaConf.is_dict(node):
            nodes += [(f"{path}.{key}", node._get_node(key)) for key in node]
    return [*sorted(found, key=str), (OmegaConf.to_yaml(tree),)]


@pytest.mark.parametrize(
    "overrides",
    [
        ("seed=3", "optimizer.lr=3e-4", "train.max_grad_norm=null", "precision.tf32=off"),
        ("optimizer=sgd", "optimizer.momentum=0.5", "model.hidden_size=64", "++seed=1"),
        ("experiment=guide_single_gpu", "schedule=cosine", "seed=${train.steps}"),
        ("trainer.extra.debug=underflow_overflow", "++trainer.extra.eval_steps=5"),
        ("data=text", "data.path='a, b/ö'", "tracker.group=\"x y\"", "hydra.job.chdir=true"),
        ("seed=1", "seed=2", "data=text"),
    ],
    ids=["values", "options", "experiment", "free keys", "text", "twice, and one missing"],
)  # fmt: skip
def test_cached_tree_matches_hydra(overrides) -> None:
    expected, choices = all_at_once(*overrides)
    for _ in range(2):  # composed, then from what is kept
        with hydra_state():
            kept = make_trees(CATALOGUE).tree(overrides)
        assert described(kept.config) == described(expected)
        assert kept.choices == choices


def test_cached_trees_are_not_modified_by_callers() -> None:
    first = compose(["seed=7", "trainer.extra.debug=x"]).config
    first.optimizer.lr = -1.0
    with hydra_state():
        tree = make_trees(CATALOGUE).tree(()).config
    tree.train.steps = 12345
    second = compose([]).config
    assert second.seed == 0
    assert second.trainer.extra == {}
    assert second.optimizer.lr > 0
    assert second.train.steps != 12345


def test_missing_marker_matches_omegaconf() -> None:
    assert model.PretrainedModel().name_or_path == omegaconf.MISSING


def test_runs_that_differ_in_values_are_composed_once() -> None:
    trees = make_trees(CATALOGUE)
    before = trees.num_composed
    for seed in range(3):
        compose(["optimizer=adamw_foreach", "schedule=wsd", "peft=ia3", f"seed={seed}"])
    assert trees.num_composed <= before + 1


@pytest.mark.slow
def test_edited_user_file_invalidates_the_cache(tmp_path) -> None:
    file = tmp_path / "experiment" / "mine.yaml"
    file.parent.mkdir()
    for steps in (3, 4):
        file.write_text(
            "# @package _global_\n# experiment=mine -- Mine.\n"
            f"defaults: [_self_]\ntrain: {{steps: {steps}}}\n"
        )
        assert compose(["experiment=mine"], tmp_path).config.train.steps == steps


# --- joined from the sections of others ----------------------------------------------------------

PARTS = [
    ("optimizer=sgd", "memory=checkpointing"),
    ("model=tiny_bert", "task=masked_lm"),
    ("data=text", "peft=lora", "hardware=cpu"),
]


@pytest.mark.parametrize("preset", [(), ("experiment=smoke",)], ids=["none", "experiment"])
def test_missing_sections_are_composed_separately(preset) -> None:
    trees = ComposeCache(CATALOGUE)
    typed = (*preset, "model=tiny_bert", "task=masked_lm", "memory=max_savings")
    with hydra_state():
        trees.tree(preset)
        joined = trees.tree(typed)
    assert trees.num_composed == 1
    expected, choices = all_at_once(*typed)
    assert described(joined.config) == described(expected)
    assert joined.choices == choices


@pytest.mark.slow
@pytest.mark.parametrize(
    "preset",
    [(), ("experiment=smoke", "recipe=low_memory"), ("sweep=guide_table", "hydra.job.chdir=true")],
    ids=["none", "two", "sweep"],
)
def test_joined_tree_matches_hydra(preset) -> None:
    trees = ComposeCache(CATALOGUE)
    with hydra_state():
        for part in PARTS:
            trees.tree((*preset, *part))
    together = (*preset, *PARTS[1], *PARTS[0], *PARTS[2], "optimizer.momentum=0.5", "seed=4")
    expected, choices = all_at_once(*together)
    with hydra_state():
        joined = trees.tree(together)
        whole = len(PARTS) if preset else 2  # all default options are in one of these
        assert trees.num_composed == whole, "no composition of Hydra's for the whole"
        assert described(joined.config) == described(expected)
        assert joined.choices == choices
        with pytest.raises(RejectedValues) as refused:
            trees.tree((*together, "optimizer.beta1=0.5"))
    assert list(refused.value.errors) == ["optimizer.beta1=0.5"]


def test_default_preset_is_joined_with_other_trees() -> None:
    """A recipe is composed again as `recipe=none` and its choices."""
    trees = ComposeCache(CATALOGUE)
    with hydra_state():
        for options in [("optimizer=sgd",), ("memory=checkpointing",)]:
            trees.tree(options)
    typed = ("recipe=none", "memory=checkpointing", "optimizer=sgd")
    expected, choices = all_at_once(*typed)
    with hydra_state():
        joined = trees.tree(typed)
    assert trees.num_composed == 2
    assert described(joined.config) == described(expected)
    assert joined.choices == choices


def test_every_option_of_eke_is_independent() -> None:
    """Else sweeps over it would cost a composition of Hydra's for each combination."""
    for group, options in CATALOGUE.options.items():
        for option in options:
            assert is_self_contained(group, option, CATALOGUE), f"{group}={option}"


@pytest.mark.parametrize(
    ("group", "text", "alone"),
    [
        ("optimizer", "lr: 0.1\n", True),
        ("optimizer", "defaults: [/schema/optimizer/sgd@_here_, _self_]\n", True),
        ("optimizer", "defaults: [/optimizer/sgd@_here_]\n", True),
        ("optimizer", "defaults: [adamw_fused, _self_]\n", True),
        ("optimizer", "# @package _global_\ntrain: {steps: 3}\n", False),
        ("optimizer", "defaults: [/model/gpt2@_global_.model]\n", False),
        ("optimizer", "defaults: [override /model: gpt2]\n", False),
        ("optimizer", "defaults: [/optimizer/sgd]\n", False),
        ("optimizer", "defaults: [absent]\n", False),
        ("optimizer", "defaults: [other]\n", False),
        ("experiment", "# @package _global_\ndefaults: [smoke, override /model: gpt2]\n", True),
        ("experiment", "# @package _global_\ndefaults: [/recipe/baseline, _self_]\n", True),
        ("experiment", "defaults: [override /peft: '${model}']\n", False),
        ("experiment", "defaults: [optional smoke]\n", False),
    ],
    ids=str,
)
def test_independence_of_an_option_file_is_detected(tmp_path, group, text, alone) -> None:
    folder = tmp_path / group
    folder.mkdir()
    (folder / "mine.yaml").write_text(text)
    (folder / "other.yaml").write_text("# @package _global_\ntrain: {steps: 3}\n")
    assert is_self_contained(group, "mine", make_catalogue(tmp_path)) is alone


def test_explicit_none_overrides_preset_of_an_experiment(tmp_path) -> None:
    file = tmp_path / "experiment" / "mine.yaml"
    file.parent.mkdir()
    text = "defaults:\n  - override /recipe: fastest\n  - _self_\n"
    file.write_text(f"# @package _global_\n# experiment=mine -- it has a recipe.\n{text}")
    trees = ComposeCache(make_catalogue(tmp_path))
    with hydra_state():
        found = [trees.tree(("experiment=mine", *more)) for more in ((), ("recipe=none",))]
    assert [tree.choices["recipe"] for tree in found] == ["fastest", "none"]


@pytest.mark.slow
def test_option_that_writes_other_sections_is_composed_by_hydra(tmp_path) -> None:
    """Here it writes what is the default, so that nothing is to be seen of it by itself."""
    file = tmp_path / "memory" / "mine.yaml"
    file.parent.mkdir()
    file.write_text("# @package _global_\nmemory: {option: mine}\noptimizer: {lr: 1.0e-3}\n")
    trees = ComposeCache(make_catalogue(tmp_path))
    with hydra_state():
        for options in [("memory=mine",), ("optimizer=sgd",), ("optimizer=sgd", "memory=mine")]:
            tree = trees.tree(options).config
    assert tree.memory.option == "mine"
    assert tree.optimizer.option == "sgd"
    assert tree.optimizer.lr == 1e-3, "memory stands behind optimizer in config.yaml"
