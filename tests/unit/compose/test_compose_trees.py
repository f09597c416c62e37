"""Values put into a kept tree give what Hydra gives when it composes everything at once."""

import hydra
import omegaconf
import pytest
from hydra.errors import HydraException
from omegaconf import OmegaConf, open_dict, read_write

from eke.compose import compose
from eke.compose.catalogue import make_catalogue
from eke.compose.overrides import as_hydra_takes_it
from eke.compose.trees import _choose_once, compose_tree, hydra_state, without_hydra
from eke.schema import model

CATALOGUE = make_catalogue()


def all_at_once(*overrides: str):
    """Hydra's own composition: its tree without its own part, its choices."""
    taken = [as_hydra_takes_it(text, CATALOGUE) for text in overrides]
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
def test_the_same_tree_as_hydras(overrides) -> None:
    expected, choices = all_at_once(*overrides)
    for _ in range(2):  # composed, then from what is kept
        with hydra_state():
            kept = without_hydra(compose_tree(overrides, CATALOGUE, None))
        assert described(kept.config) == described(expected)
        assert kept.choices == choices


@pytest.mark.parametrize(
    "overrides",
    [("optimizer.momentum=0.5",), ("seed=abc",), ("seed=1,2",), ("model=absent",), ("seed=[1",)],
    ids=["another option's key", "type", "sweep", "option", "grammar"],
)
def test_the_same_mistake_as_hydras(overrides) -> None:
    with pytest.raises(HydraException) as expected:
        all_at_once(*overrides)
    with hydra_state(), pytest.raises(HydraException) as found:
        compose_tree(overrides, CATALOGUE, None)
    assert (type(found.value), str(found.value)) == (type(expected.value), str(expected.value))


def test_what_is_kept_is_not_changed_by_who_gets_it() -> None:
    first = compose(["seed=7", "trainer.extra.debug=x"]).config
    first.optimizer.lr = -1.0
    with hydra_state():
        tree = compose_tree((), CATALOGUE, None)
    tree.train.steps = 12345
    second = compose([]).config
    assert second.seed == 0
    assert second.trainer.extra == {}
    assert second.optimizer.lr > 0
    assert second.train.steps != 12345


def test_what_must_be_given_is_marked_as_omegaconf_marks_it() -> None:
    assert model.MISSING == omegaconf.MISSING


def test_cells_that_differ_in_values_are_chosen_once() -> None:
    before = _choose_once.cache_info().misses
    for seed in range(3):
        compose(["optimizer=adamw_foreach", "schedule=wsd", f"seed={seed}"])
    assert _choose_once.cache_info().misses == before + 1


def test_an_edited_file_of_the_users_counts_at_once(tmp_path) -> None:
    file = tmp_path / "experiment" / "mine.yaml"
    file.parent.mkdir()
    for steps in (3, 4):
        file.write_text(
            "# @package _global_\n# experiment=mine -- Mine.\n"
            f"defaults: [_self_]\ntrain: {{steps: {steps}}}\n"
        )
        assert compose(["experiment=mine"], tmp_path).config.train.steps == steps
