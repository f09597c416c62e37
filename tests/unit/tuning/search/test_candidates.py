"""What may be tried: rules, forecasts and what was typed decide, before anything runs."""

import pytest
from support import last_wins

from eke.common.text import GIB
from eke.config.compose import compose
from eke.estimate.memory import Verdict
from eke.hardware import Device
from eke.rules.techniques import TECHNIQUES, Numerics, group_of
from eke.tuning.search.candidates import MAX_SIZES, axes_for, enumerate_candidates
from eke.workflows.planning import plan_for

WORK = ("model=tiny", "data=synthetic", "data.seq_len=32", "data.num_samples=64",
        "train.steps=20", "tracker=none")  # fmt: skip


def candidates(*typed: str, numerics: Numerics = Numerics.same, expected=lambda plan: None):
    composed = compose(last_wins(*WORK, *typed))
    plan = plan_for(composed, planning=True, reject=False)
    axes = axes_for(composed.choices, composed.overrides, plan.device, numerics)
    return plan, enumerate_candidates(plan, composed, axes, None, expected)


@pytest.fixture(scope="module")
def of_class():
    """Numerics -> what is found for the plain command on a CPU of 8 GiB; made once."""
    found = {}

    def make(numerics: Numerics):
        if numerics not in found:
            found[numerics] = candidates(numerics=numerics)[1]
        return found[numerics]

    return make


@pytest.mark.slow
def test_starting_configuration_is_a_candidate_and_samples_are_kept(own_machine):
    plan, found = candidates("compile=none", "batch.per_device=4", "batch.accumulation=3")
    first = found.found[found.first]
    assert not [text for value in first.values for text in value.overrides]
    assert first.point.micro_batch == 4
    assert first.plan.batch == plan.batch
    assert {each.plan.batch.samples_per_step for each in found.found} == {12}
    sizes = {each.point.micro_batch for each in found.found}
    assert sizes <= {1, 2, 3, 4, 6, 12}
    assert len(sizes) <= MAX_SIZES + 1


@pytest.mark.parametrize("typed", ["attention=sdpa", "compile=none", "memory.every_n=1"])
def test_explicit_options_are_not_searched(own_machine, typed):
    composed = compose([*WORK, typed])
    plan = plan_for(composed, planning=True, reject=False)
    axes = axes_for(composed.choices, composed.overrides, plan.device, Numerics.reduced)
    assert group_of(typed) not in [group_of(axis[0].name) for axis in axes]
    for axis in axes:
        for value in axis:
            assert group_of(typed) not in map(group_of, value.overrides)


@pytest.mark.slow
def test_classes_of_numerics_are_nested(own_machine, of_class):
    names = {}
    for numerics in Numerics:
        found = of_class(numerics)
        names[numerics] = {value.name for each in found.found for value in each.values}
    assert names[Numerics.same] < names[Numerics.mixed] < names[Numerics.reduced]
    assert "precision=bf16" in names[Numerics.mixed] - names[Numerics.same]
    assert "optimizer=adamw_8bit" in names[Numerics.reduced] - names[Numerics.mixed]


@pytest.mark.slow
def test_candidate_sets_each_group_once(own_machine, of_class):
    """bfloat16 weights bring an optimizer of their own; another one is not typed beside it."""
    found = of_class(Numerics.reduced)
    seen = set()
    for each in found.found:
        texts = [text for value in each.values for text in value.overrides]
        groups = [text.partition("=")[0] for text in texts if "." not in text.partition("=")[0]]
        assert len(groups) == len(set(groups)), texts
        seen.update(text for text in texts if text.startswith("optimizer="))
    assert seen == {"optimizer=adamw_bf16_sr", "optimizer=adamw_8bit"}


@pytest.mark.slow
def test_rejected_candidates_are_counted_by_rule(own_machine):
    _, found = candidates("model=tiny_bert", "task=masked_lm", "model.dropout=0.1",
                          numerics=Numerics.reduced)  # fmt: skip
    assert sum(found.refused.values()) + len({e.values for e in found.found}) == found.num_sets
    assert all(count > 0 for count in found.refused.values())


@pytest.mark.slow
@pytest.mark.parametrize("cut", [(16, 1), (4, 4)], ids=["at once", "in pieces"])
def test_rules_check_each_micro_batch(cut):
    """CUDA graphs take one micro-batch, whichever was typed; the rest is free to be cut."""
    size, times = cut
    typed = (f"batch.per_device={size}", f"batch.accumulation={times}", "hardware=h200")
    _, found = candidates(*typed)
    replayed = [each for each in found.found if each.plan.config.compile.replays_graphs]
    assert {each.plan.batch.accumulation for each in replayed} == {1}
    assert {each.plan.batch.accumulation for each in found.found} > {1, 4}


@pytest.mark.slow
def test_candidates_that_do_not_fit_are_excluded(own_machine):
    typed = ("compile=none", "batch.per_device=64", "data.seq_len=512", "data.num_samples=640")
    _, everything = candidates(*typed)
    assert everything.too_large == 0
    peaks = sorted(each.point.peak_bytes for each in everything.found)
    own_machine(peaks[len(peaks) // 2] + 700 * 2**20)  # the interpreter's own share is kept free
    _, some = candidates(*typed)
    assert some.too_large > 0
    assert some.found, "smaller micro-batches are left"
    assert all(each.point.verdict is not Verdict.does_not_fit for each in some.found)


def test_time_model_estimates_each_candidate(own_machine):
    _, found = candidates(expected=lambda plan: float(plan.batch.accumulation))
    assert {each.point.expected_s for each in found.found} == {
        float(each.plan.batch.accumulation) for each in found.found
    }


@pytest.mark.slow
def test_candidate_overrides_compose_to_its_plan(own_machine):
    """What is forecast is what would be run."""
    typed = ("batch.per_device=4", "batch.accumulation=2")
    _, found = candidates(*typed, numerics=Numerics.reduced)
    for each in found.found[:: max(1, len(found.found) // 12)]:
        composed = compose([*WORK, *each.overrides])
        plan = plan_for(composed, planning=True, reject=False)
        assert plan.batch == each.plan.batch
        assert plan.compute == each.plan.compute
        assert plan.config.memory == each.plan.config.memory
        assert plan.config.optimizer == each.plan.config.optimizer


@pytest.mark.slow
def test_every_technique_is_an_override_that_composes():
    for name, technique in TECHNIQUES.items():
        assert " ".join(technique.overrides) == name
        compose([*WORK, *technique.overrides])
        assert technique.slowdown_on("cpu") > 0
        assert technique.slowdown_on("cuda") > 0
        assert set(technique.more_memory) <= set(TECHNIQUES)
        assert (technique.applies is None) == (technique.edit is None)


def test_several_gpus_can_be_divided():
    composed = compose([*WORK, "hardware=h100"])
    device = Device(kind="cuda", name="NVIDIA H100 80GB HBM3", count=4, memory_bytes=80 * GIB)
    axes = axes_for(composed.choices, WORK, device, Numerics.same)
    several = next(axis for axis in axes if axis[0].name == "distributed=none")
    assert [value.overrides[-1] for value in several[1:]] == [
        "distributed.num_processes=2", "distributed.num_processes=4",
    ]  # fmt: skip
    typed = axes_for(composed.choices, [*WORK, "distributed=none"], device, Numerics.same)
    assert "distributed" not in [group_of(axis[0].name) for axis in typed]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("typed", "useless"),
    [
        pytest.param((), {"kernels=sparse_prediction"}, id="every position has a label"),
        pytest.param(
            ("model=tiny_bert", "task=sequence_classification"),
            {"kernels=sparse_prediction", "kernels=fused_linear_cross_entropy"},
            id="no vocabulary",
        ),
    ],
)
def test_options_without_effect_are_not_tried(own_machine, typed, useless):
    _, found = candidates("compile=none", *typed)
    names = {value.name for each in found.found for value in each.values}
    assert not names & useless
    assert "memory=checkpointing" in names
    assert found.first is not None
    _, kept = candidates("compile=none", *typed, min(useless))  # typed, it is the user's
    assert kept.first is not None


@pytest.mark.slow
def test_model_advice_does_not_exclude_a_format(own_machine):
    """Sizes that tensor cores like are the model's matter, and 16 bits pay all the same."""
    odd = ("hardware=h100", "model.vocab_size=333", "compile=none")
    _, found = candidates(*odd, numerics=Numerics.mixed)
    assert "precision=bf16" in {v.name for each in found.found for v in each.values}


@pytest.mark.slow
def test_technique_with_missing_package_is_not_tried(own_machine, monkeypatch):
    monkeypatch.setattr(
        "eke.rules.requirements._is_importable", lambda name: name != "bitsandbytes"
    )
    _, found = candidates("compile=none", numerics=Numerics.reduced)
    assert "optimizer=adamw_8bit" not in {v.name for each in found.found for v in each.values}
    assert found.refused["package_missing"] > 0
