"""Proposals that make room: real overrides, accepted by the rules, with room by the forecast."""

from dataclasses import replace

import pytest
from unit.plan.cases import CPU, GPU, config_of, plan_of

from eke.common.errors import ConfigError
from eke.common.text import GIB, MIB
from eke.estimate.memory import (
    Traced,
    Verdict,
    forecast,
    trace_client,
)
from eke.estimate.memory.predict_memory import with_available_bytes
from eke.hardware import DEVICES
from eke.plan.planner import Plan, outline_record, replan
from eke.plan.record import MeasuredMemory, Outcome
from eke.rules import RuleInputs, check
from eke.rules.techniques import applied
from eke.tuning import memory_advice
from eke.tuning.check_memory_fit import DOES_NOT_FIT, reject_unfit_plan
from eke.tuning.memory_advice import (
    HIGH_COST_TECHNIQUES,
    LOW_COST_TECHNIQUES,
    advice_for,
    advise,
    memory_seen,
    more_devices,
    render_advice,
    smaller_batches,
    techniques_for,
)

WORK = ("data=synthetic", "model.num_hidden_layers=6", "data.num_samples=4096")

CASES = (
    ("attention=eager", "data.seq_len=256"),
    ("model.vocab_size=20000",),
    ("batch.target=24", "batch.per_device=12"),
    ("optimizer=adamw", "batch.per_device=1"),
    ("memory=checkpointing_selective",),
    ("precision=bf16",),
    ("precision=fp16", "peft=lora"),
    ("distributed=ddp", "distributed.num_processes=2"),
    ("distributed=zero2", "distributed.num_processes=2"),
    ("model=tiny_bert", "task=masked_lm"),
    ("model=tiny_t5", "task=seq2seq_lm"),
)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(trace_client, "cache_folder", lambda: tmp_path)


def weigh(plan: Plan) -> str:
    """What is said of a plan before it runs."""
    return reject_unfit_plan(plan, forecast(plan))


def kept(overrides, more) -> list[str]:
    keys = {text.partition("=")[0] for text in more}
    return [text for text in overrides if text.partition("=")[0] not in keys]


@pytest.mark.slow
@pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_advised_overrides_compose_to_the_forecast_configuration(case, device) -> None:
    """The configuration that a technique makes is the one that its overrides compose."""
    typed = (*WORK, *case)
    plan = plan_of(*typed, device=device)
    axes = [
        smaller_batches(plan),
        *techniques_for(plan, (*LOW_COST_TECHNIQUES, *HIGH_COST_TECHNIQUES)),
    ]
    changes = [(each, applied(plan.config, [each])) for axis in axes for each in axis]
    assert any(config for _, config in changes)
    for change, config in changes:
        if config is None:
            continue
        composed = config_of(*kept(typed, change.overrides), *change.overrides)
        if change.group != "optimizer":
            assert composed == config, change.overrides
        else:
            assert type(composed.optimizer) is type(config.optimizer)


def cramped(*overrides: str, share: float = 0.9, device=CPU):
    """A plan on a device that has a share of what is expected."""
    plan = plan_of(*WORK, *overrides, device=device)
    memory = int(share * forecast(plan).peak.expected)
    return with_available_bytes(plan, memory)


@pytest.mark.parametrize("share", [0.9, 0.6, 0.4])
def test_advice_has_room_and_passes_the_rules(share) -> None:
    plan = cramped(share=share)
    found = advise(plan)
    assert found
    ranks = [each.rank for each in found]
    assert ranks == sorted(ranks)
    for each in found:
        config = config_of(*kept(WORK, each.overrides), *each.overrides)
        refused, _ = check(RuleInputs(config, plan.device, planning=True))
        assert not refused, each.overrides
        again = forecast(plan_of(*kept(WORK, each.overrides), *each.overrides, device=plan.device))
        assert again.verdict in (Verdict.fits, Verdict.tight)
        assert again.peak == each.forecast.peak
        assert again.peak == forecast(each.plan).peak


def opposite(now: Plan, changed: Plan) -> tuple[float, str]:
    """A device on which checkpointing is free, and all else is dear."""
    return (1.0 if changed.config.memory.checkpointing.value != "off" else 3.0), "a clock"


def test_fastest_proposal_comes_first(monkeypatch) -> None:
    """By published figures smaller batches cost less; this device says otherwise."""
    plan = cramped(share=0.6)
    by_figures = advise(plan)[0]
    assert by_figures.overrides[0].startswith("batch.per_device=")
    monkeypatch.setattr(memory_advice, "slowdown", opposite)
    by_clock = advise(plan)[0]
    assert by_clock.overrides[0].startswith("memory=checkpointing")
    assert (by_clock.slowdown, by_clock.reasons) == (1.0, ("a clock",))
    with pytest.raises(ConfigError) as caught:
        weigh(sized(0.99))
    assert "memory=checkpointing" in str(caught.value.problems[0].fix)


def free_adapters(now: Plan, changed: Plan) -> tuple[float, str]:
    """A device on which changing the training is what is cheap."""
    keeps = changed.config.peft == now.config.peft and (
        changed.config.optimizer == now.config.optimizer
    )
    return (2.0 if keeps else 0.1), "a clock"


def test_equivalent_training_is_proposed_first(monkeypatch) -> None:
    monkeypatch.setattr(memory_advice, "slowdown", free_adapters)
    plan = cramped(share=0.9)
    found = advise(plan, 20)
    kept = [each.keeps for each in found]
    assert True in kept
    assert False in kept
    assert kept == sorted(kept, reverse=True)
    assert advise(plan, 1)[0].keeps


def test_both_variants_of_a_technique_are_checked() -> None:
    """16-bit operands were passed over where only 16-bit weights surely had room."""
    plan = plan_of(*WORK, device=GPU)
    pure = plan_of(*WORK, "precision=bf16_pure", device=GPU)
    memory = forecast(pure).peak.high
    assert memory > forecast(plan_of(*WORK, "precision=bf16", device=GPU)).peak.expected
    found = advise(replace(plan, device=replace(GPU, memory_bytes=memory)), 20)
    typed = {each.overrides: each.forecast.verdict for each in found}
    assert typed["precision=bf16",] is Verdict.tight
    assert typed["precision=bf16_pure",] is Verdict.fits


def test_stored_traces_are_used_for_advice() -> None:
    """By a trace that is kept: as the plan itself is."""
    plan = cramped(share=0.9)
    first = advise(plan, 20)[0]
    trace_client.keep_trace(
        trace_client.trace_key(first.plan), Traced({"forward": 9 * MIB}, {"forward": 9 * MIB}, {})
    )
    found = advise(plan, 20)
    (first,) = [each for each in found if each.overrides == first.overrides]
    assert first.forecast.peak.expected == 9 * MIB
    text = " ".join(" ".join(render_advice(forecast(plan), found)).split())
    assert "(traced): fits" in text
    assert "(by formulas): fits" in text


@pytest.mark.parametrize(
    ("device", "first"), [(GPU, "precision=tf32"), (DEVICES["v100_16"], "precision=fp32")]
)
def test_advice_avoids_copies_of_frozen_weights(device, first) -> None:
    wide = ("peft=lora", "model.hidden_size=1024", "batch.per_device=1")
    plan = plan_of(*WORK, *wide, "precision=fp16", device=device)
    plain = plan_of(*WORK, *wide, "precision=fp32", device=device)
    found = advise(with_available_bytes(plan, int(1.1 * forecast(plain).peak.expected)))
    same = [each.overrides for each in found if each.keeps]
    assert (first,) in same


def test_smaller_batches_keep_samples_per_step() -> None:
    plan = cramped(share=0.5)
    (first,) = [a for a in advise(plan, 20) if a.overrides[0].startswith("batch") and a.keeps][:1]
    size, count = (int(text.partition("=")[2]) for text in first.overrides[:2])
    assert size * count == plan.batch.samples_per_step


def test_smaller_batch_is_not_advised_with_a_router_loss() -> None:
    typed = (*WORK, "model=tiny_moe", "batch.per_device=8")
    assert smaller_batches(plan_of(*typed))
    assert smaller_batches(plan_of(*typed, "task.router_loss=0.1")) == ()


def test_advice_is_empty_if_no_change_fits() -> None:
    plan = cramped(share=0.001)
    assert advise(plan) == []
    assert "hardware=all" in "\n".join(render_advice(forecast(plan), []))


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_advice_fits_the_screen(columns, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    plan = cramped(share=0.9)
    found = advise(plan, 20)
    lines = render_advice(forecast(plan), found, sources=True)
    text = "\n".join(lines)
    assert text.index("same training") < text.index("another training")
    typed = {" ".join(each.overrides) for each in found}
    assert all(any(line.strip().startswith(each) for line in lines) for each in typed)
    long = {line.strip() for line in lines if len(line) > columns}
    assert all(line in typed or line.startswith("http") for line in long)


def test_advice_after_oom_saves_memory() -> None:
    """Of what was forecast or, where that is less, of what was seen."""
    plan = plan_of(*WORK)
    expected = forecast(plan).peak.expected
    for seen, limit in ((None, expected), (expected // 4, expected // 4)):
        proposals = advice_for(plan, seen)
        assert proposals
        for text in proposals:
            typed = text.split()
            less = forecast(plan_of(*kept(WORK, typed), *typed)).peak.expected
            assert less <= 0.85 * limit
    assert advice_for(plan, seen=1) == advice_for(plan), "a guess is better than nothing"


@pytest.mark.parametrize(
    ("device", "measured", "seen"),
    [
        (CPU, MeasuredMemory(process_peak_bytes=3 * GIB, stages={"kernels_loaded": GIB}), 2 * GIB),
        (CPU, MeasuredMemory(process_peak_bytes=3 * GIB), None),
        (GPU, MeasuredMemory(peak_reserved_bytes=3 * GIB, process_peak_bytes=9 * GIB), 3 * GIB),
        (GPU, MeasuredMemory(process_peak_bytes=9 * GIB, stages={"kernels_loaded": GIB}), None),
        (GPU, None, None),
    ],
    ids=["cpu", "cpu, nothing known before", "gpu", "gpu, nothing reserved", "nothing"],
)
def test_memory_at_oom_is_described(device, measured, seen) -> None:
    plan = plan_of(*WORK, device=device)
    record = outline_record(plan, [], 0, Outcome.oom, None)
    record.memory.measured = measured
    assert memory_seen(plan, record) == seen


# --- the rule ------------------------------------------------------------------------------------


def sized(low: float):
    """A plan on a device with so many times its lowest forecast."""
    plan = plan_of(*WORK)
    memory = int(low * forecast(plan).peak.low)
    return with_available_bytes(plan, memory)


def test_run_below_the_lowest_forecast_is_rejected_with_a_fix() -> None:
    with pytest.raises(ConfigError) as caught:
        weigh(sized(0.99))
    (problem,) = caught.value.problems
    assert problem.id == DOES_NOT_FIT
    assert "ignore_forecast=true" in str(problem.fix)
    typed = problem.overrides
    fixed = plan_of(*kept(WORK, typed), *typed, device=sized(0.99).device)
    assert weigh(fixed) == ""


def test_tight_run_starts_with_a_warning() -> None:
    assert "expected" in weigh(sized(1.01))


def test_fitting_forced_and_unknown_runs_are_not_rejected() -> None:
    assert weigh(plan_of(*WORK)) == ""
    assert weigh(plan_of(*WORK, device=replace(CPU, memory_bytes=None))) == ""
    forced = sized(0.5)
    forced.config.ignore_forecast = True
    assert "expected" in weigh(forced)


@pytest.mark.slow
def test_guide_table_is_within_v100_bounds() -> None:
    """Measured by NVML in 2022, context and all; MiB as nvidia-smi prints them."""
    from reference.published import ROWS

    from eke.hardware import DEVICES

    for row in ROWS:
        overrides = ("experiment=guide_single_gpu", "attention=eager", *row.overrides.split())
        found = forecast(plan_of(*overrides, device=DEVICES["v100_16"]))
        assert found.peak.low <= row.memory_mb * MIB <= found.peak.high, row.technique


EIGHT_B = ("model=llama3_8b", "data=synthetic", "data.seq_len=4096", "precision=bf16")


def test_smallest_fitting_gpu_count_is_proposed() -> None:
    plan = plan_of(*EIGHT_B, "batch.per_device=8", device=DEVICES["h100"])
    found = [each for each in advise(plan, 20) if "distributed=fsdp" in each.overrides]
    counts = [each.plan.config.distributed.num_processes for each in found]
    fewest = found[counts.index(min(counts))]
    assert fewest.keeps
    assert fewest.overrides[-2:] == ("batch.per_device=1", "batch.accumulation=1")
    config = fewest.plan.config
    half = replace(config.distributed, num_processes=min(counts) // 2)
    twice = replace(config.batch, per_device=2)
    smaller = replan(fewest.plan, replace(config, distributed=half, batch=twice))
    assert forecast(smaller).verdict is Verdict.does_not_fit


@pytest.mark.parametrize(
    ("device", "overrides"),
    [(replace(DEVICES["h100"], present=True), ()), (DEVICES["h100"], ("distributed=zero3",))],
    ids=["this machine has one", "shared otherwise"],
)
def test_proposed_gpu_count_is_possible(device, overrides) -> None:
    assert not more_devices(plan_of(*EIGHT_B, *overrides, device=device))
