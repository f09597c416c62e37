"""Learning rates: the first step, the peak, the last step, and nothing outside."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.training.model.plans import hand_plan, options_of

from eke.training.optimizer.build_optimizer import SHAPES, build_schedule


def multiplier(option, total=100, warmup=10, **fields):
    plan = hand_plan("data=synthetic", f"schedule={option}")
    schedule = dataclasses.replace(plan.config.schedule, **fields)
    config = dataclasses.replace(plan.config, schedule=schedule)
    steps = dataclasses.replace(plan.steps, total=total, warmup=warmup)
    return build_schedule(dataclasses.replace(plan, config=config, steps=steps))


def test_options_match_builders() -> None:
    assert set(SHAPES) == options_of("schedule") - {"custom"}


@pytest.mark.parametrize("option", sorted(SHAPES))
def test_warm_up_is_linear(option) -> None:
    rate = multiplier(option)
    assert [rate(step) for step in range(10)] == pytest.approx([n / 10 for n in range(1, 11)])
    assert rate(10) == pytest.approx(1.0), "the peak holds for the first step after it"


@pytest.mark.parametrize(
    ("option", "final", "middle", "last"),
    [
        ("constant", None, 1.0, 1.0),
        ("linear", 0.0, 0.5, 1 / 90),
        ("linear", 0.2, 0.6, 0.2 + 0.8 / 90),
        ("cosine", 0.0, 0.5, 0.0003046),
        ("cosine", 0.2, 0.6, 0.2 + 0.8 * 0.0003046),
        ("wsd", 0.0, 1.0, 0.05),
        ("wsd", 0.2, 1.0, 0.2 + 0.8 * 0.05),
    ],
    ids=lambda value: str(value),
)
def test_schedule_shapes(option, final, middle, last) -> None:
    """The end is reached after the last step, so that the last step still learns something."""
    fields = {} if final is None else {"final_frac": final}
    rate = multiplier(option, **fields)
    assert rate(55) == pytest.approx(middle)
    assert rate(99) == pytest.approx(last, rel=1e-3)
    if final is not None:
        assert rate(100) == pytest.approx(final, abs=1e-12)


def test_wsd_is_stable_until_its_decay() -> None:
    rate = multiplier("wsd", decay_frac=0.2)
    assert {rate(step) for step in range(10, 80)} == {1.0}
    assert [rate(step) for step in (80, 85, 90, 95)] == pytest.approx([1.0, 0.75, 0.5, 0.25])
    assert multiplier("wsd", decay_frac=0.0)(99) == pytest.approx(1.0)


@pytest.mark.parametrize("decay_frac", [0.95, 1.0], ids=str)
def test_overlong_decay_starts_at_the_peak(decay_frac) -> None:
    rate = multiplier("wsd", warmup=50, decay_frac=decay_frac)
    assert rate(49) == rate(50) == pytest.approx(1.0)
    assert rate(75) == pytest.approx(0.5)


@settings(deadline=None)
@given(
    option=st.sampled_from(sorted(SHAPES)),
    total=st.integers(1, 200),
    share=st.floats(0, 1),
    final=st.floats(0, 1),
)
def test_rates_rise_to_the_peak_and_fall_to_the_end(option, total, share, final) -> None:
    warmup = round(total * share)
    fields = {} if option == "constant" else {"final_frac": final}
    rate = multiplier(option, total=total, warmup=warmup, **fields)
    rates = [rate(step) for step in range(total)]
    assert rates[:warmup] == sorted(rates[:warmup])
    falling = rates[max(0, warmup - 1) :]
    assert all(after <= before + 1e-12 for before, after in itertools.pairwise(falling))
    assert all(0 <= value <= 1 + 1e-12 for value in rates)
    assert all(value >= fields.get("final_frac", 0) - 1e-12 for value in rates[warmup:])
    assert max(rates) == pytest.approx(1.0)
