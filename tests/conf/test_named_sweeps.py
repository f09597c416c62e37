"""The files in sweeps/: their own command composes, and experiment=small shrinks any of them."""

import re

import pytest
from named_sweeps import FILES, command_of, expanded, rows_of

from eke.config.compose import compose
from eke.config.compose.catalogue import headline


@pytest.fixture(scope="module", params=FILES)
def name(request) -> str:
    """Each sweep with all its tests in a row: one process expands it once for them."""
    return request.param


@pytest.mark.slow
def test_first_line_is_a_command_that_composes(name) -> None:
    assert re.fullmatch(r"python train\.py -m sweep=.+ -- .+\.", headline(FILES[name]))
    script, flag, *overrides = command_of(name)
    assert (script, flag) == ("train.py", "-m")
    assert f"sweep={name}" in overrides
    cells = expanded(*overrides)
    assert list(dict.fromkeys(cell.row for cell in cells)) == list(rows_of(name))
    assert {cell.composed.choices["sweep"] for cell in cells} == {name}


@pytest.mark.slow
def test_experiment_small_changes_only_sizes(name) -> None:
    large = expanded(*command_of(name)[2:])
    small = expanded(*command_of(name)[2:], "experiment=small")
    assert [cell.row for cell in small] == [cell.row for cell in large]
    for one, other in zip(small, large, strict=True):
        config, full = one.composed.config, other.composed.config
        assert (config.model.num_hidden_layers, config.train.steps) == (2, 12)
        assert (config.model.hidden_size, config.data.seq_len) == (128, 64)
        assert config.train.epochs is None
        assert config.model.family == full.model.family
        assert config.batch == full.batch
        choices = one.composed.choices
        assert choices == {**other.composed.choices, "experiment": "small"}


@pytest.mark.slow
def test_rows_of_a_sweep_differ(name) -> None:
    cells = expanded(*command_of(name)[2:])
    cells = [cell for cell in cells if cell.composed.config.repeat == 0]
    same = {repr(cell.composed.config): cell.row for cell in cells}
    # the guide shows this one twice: by Trainer, and in a loop of one's own
    twice = {"guide_table": {"all_adam_8bit"}}
    assert {cell.row for cell in cells} - set(same.values()) == twice.get(name, set())


@pytest.mark.slow
def test_override_changes_settings_of_a_sweep() -> None:
    own = ["sweep=guide_table"]
    assert compose(own, in_sweep=True).config.model.option == "bert_large"
    typed = compose([*own, "experiment=small", "recipe=guide_best"], in_sweep=True)
    assert typed.config.model.option == "bert_large", "small says nothing of the family"
    assert typed.config.model.hidden_size == 128
    assert typed.choices["optimizer"] == "adafactor"
    last = compose([*own, "experiment=small", "model.hidden_size=64"], in_sweep=True)
    assert last.config.model.hidden_size == 64


def test_override_replaces_experiment_of_a_sweep() -> None:
    composed = compose(["sweep=guide_table", "experiment=smoke"], in_sweep=True)
    assert composed.config.train.steps == 20
    assert composed.config.data.seq_len == 64
    assert composed.config.data.num_samples == 512, "of guide_single_gpu: smoke says nothing"
