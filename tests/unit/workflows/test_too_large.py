"""Models whose state alone has no room: refused with what makes room for all of the run."""

import pytest
from recipe_plans import planned

from eke.common.errors import ConfigError, Problem
from eke.config.compose import compose
from eke.estimate.memory import Verdict, forecast, trace_client
from eke.plan.planner import Plan
from eke.tuning.memory_advice import advise
from eke.workflows.planning import plan_for

SEVEN = ("model=llama2_7b", "data.seq_len=4096")
ONE = ("model=llama_1b", "data.seq_len=512")


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(trace_client, "cache_folder", lambda: tmp_path)


def started(*overrides: str) -> Plan:
    """As it is planned where it is to start."""
    composed = compose([*overrides, "data=synthetic", "tracker=none"], in_sweep=True)
    return plan_for(composed, planning=True, reject=True, trace=False)


def refusal(*overrides: str) -> Problem:
    with pytest.raises(ConfigError) as refused:
        started(*overrides)
    (problem,) = refused.value.problems
    return problem


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((*SEVEN, "hardware=h100", "recipe=fastest"), id="a-recipe"),
        pytest.param((*SEVEN, "hardware=h100", "batch=auto"), id="auto"),
        pytest.param((*ONE, "hardware=t4"), id="a-small-device"),
        pytest.param(("model=t5_3b", "task=seq2seq_lm", "hardware=t4"), id="four-bits"),
        pytest.param(("model=llama3_8b", "data.seq_len=2048", "hardware=t4"), id="three-changes"),
    ],
)
def test_proposed_override_leaves_room_for_activations(overrides) -> None:
    """Adafactor makes room for the state of each of them, and none of them trains with that."""
    problem = refusal(*overrides)
    assert problem.id == "states_do_not_fit"
    assert "optimizer state" in problem.why
    plan = started(*overrides, *problem.overrides)
    found = forecast(plan)
    assert found.verdict in (Verdict.fits, Verdict.tight)
    assert "GiB expected" in problem.remark
    narrow = forecast(planned(*overrides, "data=synthetic", "optimizer=adafactor"))
    assert narrow.verdict is Verdict.does_not_fit


@pytest.mark.slow
def test_smaller_model_is_proposed_if_no_override_fits() -> None:
    assert str(refusal("model=mixtral_8x7b", "hardware=t4").fix) == "model=tiny_moe"


def test_adapters_of_random_weights_are_proposed_last() -> None:
    """They would be the quickest, and learn little."""
    plan = planned(*ONE, "data=synthetic", "hardware=t4")
    first = advise(plan, 1)[0]
    assert not any(text.startswith("peft=") for text in first.overrides)
