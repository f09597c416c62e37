"""Micro-batches that keep the samples of a step, and the plan with one of them."""

import pytest
from unit.plan.cases import SYNTHETIC, config_of, plan_config, plan_of

from eke.plan.planner import Decision, possible_batches, samples_to_keep, with_batch

TWO = ("distributed=ddp", "distributed.num_processes=2")


@pytest.mark.parametrize(
    ("typed", "target", "sizes"),
    [
        pytest.param((), 8, [1, 2, 4, 8], id="as many samples as batch=fixed"),
        pytest.param(TWO, 16, [1, 2, 4, 8], id="of each of two processes"),
        pytest.param(("batch.target=12",), 12, [1, 2, 3, 4, 6, 12], id="twelve"),
        pytest.param(("batch.target=12", *TWO), 12, [1, 2, 3, 6], id="twelve of two processes"),
        pytest.param(("batch.target=13",), 13, [1, 13], id="a prime"),
        pytest.param(("batch.target=1",), 1, [1], id="one"),
        pytest.param(("batch.target=36",), 36, [1, 2, 3, 4, 6, 9, 12, 18, 36], id="a square"),
    ],
)
def test_every_divisor_is_listed_once(typed, target, sizes) -> None:
    config = config_of(*SYNTHETIC, "batch=auto", *typed)
    assert samples_to_keep(config) == target
    found = possible_batches(config)
    assert [each.batch.per_device for each in found] == sizes
    for each in found:
        assert plan_config(each).batch.samples_per_step == target


def test_router_loss_keeps_the_micro_batch() -> None:
    """It is a mean over each: whatever fits, the training stays the same."""
    routed = (*SYNTHETIC, "model=tiny_moe", "task.router_loss=0.1", "batch.target=64")
    sizes = {}
    for batch in ("batch=auto", "batch.per_device=4", "batch.per_device=24"):
        found = possible_batches(config_of(*routed, batch))
        sizes[batch] = [each.batch.per_device for each in found]
    assert sizes == {"batch=auto": [8], "batch.per_device=4": [4], "batch.per_device=24": [16]}


@pytest.mark.parametrize(
    "more",
    [(), TWO, ("distributed=zero2", "distributed.num_processes=2"), ("batch.eval_per_device=3",)],
    ids=["alone", "ddp", "deepspeed", "evaluation"],
)
def test_auto_batch_equals_the_explicit_configuration(more) -> None:
    """The identity, and all that the worker reads, DeepSpeed's settings included."""
    typed = plan_of(*SYNTHETIC, "batch.per_device=4", "batch.target=16", *more)
    config = config_of(*SYNTHETIC, "batch=auto", "batch.target=16", *more)
    smallest, *_ = possible_batches(config)
    reason = Decision("batch.per_device", "4", "auto")
    chosen = next(each for each in possible_batches(config) if each.batch.per_device == 4)
    cut = with_batch(plan_config(smallest), chosen, [reason], ["a warning"])
    for name in ("run_id", "config", "batch", "steps", "compute", "deepspeed", "size"):
        assert getattr(cut, name) == getattr(typed, name), name
    rest = [each for each in cut.decisions if each != reason]
    assert sorted(map(str, rest)) == sorted(map(str, typed.decisions))
    assert cut.decisions[1] == reason
    assert cut.warnings[0] == "a warning"
    accumulated = plan_of(
        *SYNTHETIC, "batch.per_device=4", f"batch.accumulation={cut.batch.accumulation}", *more
    )
    assert accumulated.run_id == cut.run_id


def test_open_micro_batch_is_planned_as_one_sample() -> None:
    batch = plan_of(*SYNTHETIC, "batch=auto").batch
    assert (batch.per_device, batch.accumulation) == (1, 8)
