"""No sentence is data: with every text for people replaced, behaviour stays the same."""

from pathlib import Path
from typing import Any

import pytest
from recipe_plans import BERT, planned
from unit.rules.devices import CPU

from eke.cli.doctor import find_options
from eke.common.errors import ConfigError, Fix, Problem
from eke.config.compose import compose
from eke.estimate.memory import Method, forecast
from eke.estimate.memory.components import UNCERTAINTY_REASONS, Traced
from eke.plan.planner import Decision
from eke.workflows.auto_batch import chosen_overrides

TEXT = "TEXT"


@pytest.fixture(params=["own texts", "constants"], autouse=True)
def texts(request, monkeypatch) -> None:
    """Every reason, remark and note as it is, and then a constant in place of each."""
    if request.param == "constants":
        _replace(monkeypatch, Problem, why=lambda _: TEXT, fix=_without_remark)
        _replace(monkeypatch, Decision, reason=lambda _: TEXT)
        for doubt in UNCERTAINTY_REASONS:
            monkeypatch.setitem(UNCERTAINTY_REASONS, doubt, TEXT)


def _without_remark(problem: Problem) -> Fix:
    return Fix(*problem.fix.words, remark=TEXT if problem.fix.remark else "")


def _replace(monkeypatch: pytest.MonkeyPatch, kind: type, **new: Any) -> None:
    original: Any = kind.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for name, value in new.items():
            object.__setattr__(self, name, value(self))

    monkeypatch.setattr(kind, "__init__", init)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        pytest.param(
            "precison=bf16 optimizer.rank=4 seed=x",
            {"precison": "precision=bf16", "seed": "seed=0", "optimizer.rank": "optimizer=galore"},
            id="several",
        ),
        pytest.param(
            "optimizer.lr=x optimizer.rank=4",
            {"optimizer.lr": "optimizer.lr=0.001"},
            id="a section with a problem hides its other ones",
        ),
        pytest.param("seed=1,2 sweep.repeats=2", {"seed": "-m", "sweep.repeats": "-m"}, id="sweep"),
        pytest.param("data=json", {"data": None}, id="placeholder"),
        pytest.param("data=json data.path=x", {"data": "data=jsonl"}, id="placeholder filled"),
    ],
)
def test_problem_sentences(typed: str, expected: dict[str, str | None]) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(typed.split())
    found = {p.key: p.overrides[0] if p.overrides else None for p in caught.value.problems}
    assert found == expected


@pytest.mark.slow
def test_option_sentences_of_this_machine() -> None:
    found = {(each.group, each.option): each for each in find_options(CPU)}
    nvme = found["offload", "nvme"]
    assert nvme.overrides or nvme.usable
    assert found["attention", "flash2"].overrides == ("attention=sdpa",)
    assert found["memory", "activation_offload"].usable == found["memory", "none"].usable


@pytest.mark.slow
def test_recipe_decision_sentences() -> None:
    plan = planned("recipe=fastest", *BERT, "hardware=h100")
    chosen = dict(text.split("=", 1) for text in chosen_overrides(plan))
    assert chosen["precision"] == "bf16"
    assert "schedule.warmup_steps" not in chosen, "not one of the recipe's"


def test_forecast_sentences_with_and_without_trace(tmp_path: Path) -> None:
    plan = planned(*BERT, "hardware=h100", "compile=inductor")
    closed = forecast(plan)
    sizes = dict.fromkeys(("forward", "backward", "optimizer"), closed.peak.expected)
    exact = forecast(plan, Traced(sizes, sizes, {}))
    inexact = forecast(plan, Traced(sizes, sizes, {}, Method.trace, ("kernels",), False))
    assert exact.peak.high < inexact.peak.high
    assert set(closed.doubts) > set(exact.doubts)
    assert exact.doubts == ("driver",)
