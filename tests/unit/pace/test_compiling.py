"""What compiling is expected to take: in the right order, and near what was measured."""

import pytest
from unit.pace.cases import CPU, small

from eke.pace import compile_seconds

BERT = ("model=bert_base", "task=masked_lm", "model.num_hidden_layers=6")


@pytest.mark.parametrize("option", ["none", "eager", "aot_eager"])
def test_without_inductor_nothing_is_generated(option):
    assert compile_seconds(small(f"compile={option}")) == 0


@pytest.mark.parametrize(
    ("regional", "measured"), [(False, 42.8), (True, 24.5)], ids=["whole", "regional"]
)
def test_on_a_processor_it_is_what_bert_took(regional, measured):
    plan = small(*BERT, "compile=inductor", f"compile.regional={regional}", device=CPU)
    assert compile_seconds(plan) == pytest.approx(measured, rel=0.1)


def test_layers_count_where_all_are_compiled():
    """An encoder's and a decoder's."""
    twelve, four = (
        compile_seconds(small("compile=inductor", f"model.num_hidden_layers={layers}"))
        for layers in (12, 4)
    )
    assert twelve > 2 * four
    both = compile_seconds(small("model=tiny_t5", "task=seq2seq_lm", "compile=inductor"))
    assert both > four
    regional = [
        compile_seconds(
            small("compile=inductor", "compile.regional=true", f"model.num_hidden_layers={n}")
        )
        for n in (4, 12)
    ]
    assert regional[0] == regional[1] < four
