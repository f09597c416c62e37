"""The language of `sweep.exclude`."""

import pytest

from eke.config.sweep.exclusion import read_expression

RUN = {
    "precision": "fp16",
    "model": "tiny_t5",
    "optimizer.lr": 0.001,
    "seed": 3,
    "compile.regional": False,
    "schedule.warmup_steps": None,
}


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        pytest.param("precision=fp16 and model=tiny_t5", True, id="and"),
        pytest.param("precision=fp16\n  and model=tiny_t5\n", True, id="two lines"),
        pytest.param("precision=bf16 or model=tiny_t5", True, id="or"),
        pytest.param("precision=fp16 or seed=1 and seed=2", True, id="and binds tighter"),
        pytest.param("(precision=fp16 or seed=1) and seed=2", False, id="parentheses"),
        pytest.param("not precision=fp16", False, id="not"),
        pytest.param("not (seed=1 or seed=2)", True, id="not of parentheses"),
        pytest.param("precision == 'fp16'", True, id="two signs, quotes"),
        pytest.param("seed in (1, 3)", True, id="in"),
        pytest.param("seed not in (1, 3)", False, id="not in"),
        pytest.param("optimizer.lr<=0.0010", True, id="at most"),
        pytest.param("optimizer.lr<1e-3", False, id="below"),
        pytest.param("seed < 10", True, id="numbers, not texts"),
        pytest.param("compile.regional=false", True, id="boolean"),
        pytest.param("compile.regional=0", False, id="a boolean is no number"),
        pytest.param("schedule.warmup_steps=null", True, id="null"),
        pytest.param("schedule.warmup_steps<5", False, id="null is not below"),
        pytest.param("optimizer.momentum=0.9", False, id="another option's key"),
        pytest.param("optimizer.momentum!=0.9", True, id="another option's key is unequal"),
    ],
)
def test_expression_is_evaluated_for_a_run(text, answer) -> None:
    assert read_expression(text).holds(RUN.__getitem__) is answer


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param("precision", id="key alone"),
        pytest.param("=fp16", id="no key"),
        pytest.param("3=seed", id="a number for a key"),
        pytest.param("(precision=fp16", id="parenthesis open"),
        pytest.param("precision=fp16)", id="parenthesis closed"),
        pytest.param("precision=fp16 bf16", id="no word between"),
        pytest.param("precision in fp16", id="in without parentheses"),
        pytest.param("precision in ()", id="in without values"),
        pytest.param("precision=(fp16, bf16)", id="several values without in"),
        pytest.param("seed<3<5", id="two comparisons in one"),
        pytest.param("precision=fp16 and", id="ends with and"),
        pytest.param("precision=fp16 & model=tiny", id="another language's and"),
        pytest.param("precision='fp16", id="an open quote"),
        pytest.param("__import__('os')", id="Python"),
        pytest.param("seed=<3", id="signs turned round"),
        pytest.param("(" * 10_000, id="deep"),
    ],
)
def test_unsupported_expression_is_rejected(text) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the caller has the message
        read_expression(text)
    assert str(caught.value) == text
