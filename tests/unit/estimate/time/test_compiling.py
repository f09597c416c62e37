"""What compiling is expected to take: in the right order, and near what was measured."""

import pytest
from unit.estimate.time.cases import CPU, small

from eke.estimate.time import compile_seconds, steps_to_pay

BERT = ("model=bert_base", "task=masked_lm", "model.num_hidden_layers=6")
TINY = ("model=tiny", "model.num_hidden_layers=4")


@pytest.mark.parametrize("option", ["none", "eager", "aot_eager"])
def test_model_without_inductor_has_no_compile_time(option):
    assert compile_seconds(small(f"compile={option}")) == 0


@pytest.mark.parametrize(
    ("model", "regional", "measured"),
    [(BERT, False, 42.8), (BERT, True, 24.5), (TINY, False, 22.9), (TINY, True, 35.8)],
)
def test_compile_time_on_a_cpu_matches_measurement(model, regional, measured):
    """Within a quarter, on the machine of the lab book."""
    plan = small(*model, "compile=inductor", f"compile.regional={regional}", device=CPU)
    assert compile_seconds(plan) == pytest.approx(measured, rel=0.25)


def test_layer_count_changes_full_model_compile_time():
    """An encoder's and a decoder's."""
    twelve, four = (
        compile_seconds(small("compile=inductor", f"model.num_hidden_layers={layers}"))
        for layers in (12, 4)
    )
    assert twelve > 1.5 * four
    both = compile_seconds(small("model=tiny_t5", "task=seq2seq_lm", "compile=inductor"))
    assert both > four
    regional = [
        compile_seconds(
            small("compile=inductor", "compile.regional=true", f"model.num_hidden_layers={n}")
        )
        for n in (4, 12)
    ]
    assert regional[0] == regional[1] < four
    seq2seq = ("model=tiny_t5", "task=seq2seq_lm", "compile=inductor", "compile.regional=true")
    assert compile_seconds(small(*seq2seq)) == 2 * regional[0]


def test_compiling_can_cost_more_than_it_saves():
    assert steps_to_pay(small("train.steps=30")) == 30
    assert 1 / steps_to_pay(small("train.steps=30", "recipe.horizon=steady")) == 0
