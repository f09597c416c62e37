"""Losses that depend on how a step is cut are refused before the first step."""

import pytest
from own_plans import chars, on_path, own_plan, pairs, run_folder, shapes
from trained import steps_of, train_job

from eke.common.errors import ConfigError
from eke.config import schema

on_path()

CUT = ("batch.per_device=4", "batch.accumulation=2")


def problem_of(plan, tmp_path):
    with pytest.raises(ConfigError) as raised:
        train_job(plan, run_folder(tmp_path, plan))
    (problem,) = raised.value.problems
    return problem


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_mean_over_another_count_is_named(precision, make_plan, tmp_path) -> None:
    if precision == "bf16":
        plan = own_plan(make_plan, *CUT, "precision=bf16", **chars())
        assert steps_of(train_job(plan, run_folder(tmp_path, plan)))
        return
    plan = own_plan(make_plan, *CUT, **chars(per=None))
    found = problem_of(plan, tmp_path)
    assert (found.key, found.overrides) == ("loss.per", ("loss.per=y",))


def test_full_rows_may_be_cut_by_samples(make_plan, tmp_path) -> None:
    plan = own_plan(make_plan, *CUT, **chars(ragged=False, per=None))
    assert len(steps_of(train_job(plan, run_folder(tmp_path, plan)))) == 6


def test_coupled_samples_are_refused_when_a_step_is_cut(make_plan, tmp_path) -> None:
    plan = own_plan(make_plan, *CUT, samples=16, **pairs(couples=False))
    found = problem_of(plan, tmp_path)
    assert (found.id, found.overrides) == ("coupled_samples", ("loss.couples_batch=true",))
    whole = own_plan(make_plan, "batch.per_device=8", samples=16, **pairs(couples=False))
    assert len(steps_of(train_job(whole, run_folder(tmp_path, whole)))) == 6
    told = own_plan(make_plan, *CUT, samples=16, **pairs(couples=True))
    assert len(steps_of(train_job(told, run_folder(tmp_path, told)))) == 6


def test_batch_norm_couples_samples(make_plan, tmp_path) -> None:
    groups = {
        "model": schema.CustomModel(target="shapes.parts.Normed"),
        "data": schema.CustomData(target="shapes.data.Images", keys=["image", "label"]),
        "loss": schema.CustomLoss(target="shapes.net.smooth"),
    }
    found = problem_of(own_plan(make_plan, *CUT, samples=20, **groups), tmp_path)
    assert found.id == "coupled_samples"


@pytest.mark.parametrize(
    ("how", "named"), [("attribute", "Counts.calls"), ("buffer", "Counts.seen")]
)
def test_state_that_a_checkpoint_lacks_is_refused(how, named, make_plan, tmp_path) -> None:
    groups = {
        **shapes(),
        "model": schema.CustomModel(target="shapes.net.Counts", args={"how": how}),
    }
    plan = own_plan(make_plan, "batch.per_device=10", samples=20, **groups)
    found = problem_of(plan, tmp_path)
    assert found.id == "hidden_state"
    assert named in found.why
    typed = ("train.save_on_signal=false", "train.checkpoint_every=null")
    assert set(" ".join(found.overrides).split()) == set(typed)
    off = own_plan(make_plan, "batch.per_device=10", *typed, samples=20, **groups)
    assert len(steps_of(train_job(off, run_folder(tmp_path, off)))) == 6


@pytest.mark.parametrize("how", ["saved", "none"])
def test_saved_state_and_caches_may_change(how, make_plan, tmp_path) -> None:
    groups = {
        **shapes(),
        "model": schema.CustomModel(target="shapes.net.Counts", args={"how": how}),
    }
    plan = own_plan(make_plan, "batch.per_device=10", samples=20, **groups)
    assert len(steps_of(train_job(plan, run_folder(tmp_path, plan)))) == 6
