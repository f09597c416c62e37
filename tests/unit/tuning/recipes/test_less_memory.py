"""recipe=low_memory and recipe=large_model_one_gpu: chosen by the forecast, and said with it."""

from dataclasses import replace

import pytest
from recipe_plans import BERT, SEVEN, chosen, planned, said

from eke.config.compose import compose
from eke.estimate.memory import Verdict, forecast
from eke.hardware import DEVICES
from eke.plan.planner import Plan
from eke.rules.techniques import Numerics, Published, Technique
from eke.tuning.recipe_search import cost_of
from eke.workflows.planning import plan_for

LOW, LARGE = "recipe=low_memory", "recipe=large_model_one_gpu"


def peak(plan) -> int:
    return forecast(plan).peak.expected


def planned_with(capacity: int, *overrides: str) -> Plan:
    """`eke plan` for a GPU like an H200 with so much memory."""
    device = replace(DEVICES["h200"], memory_bytes=capacity, available_bytes=capacity)
    composed = compose([*overrides, "hardware=h200", "tracker=none"], in_sweep=True)
    return plan_for(composed, planning=True, target=(device, "made up", 1))


@pytest.mark.slow
@pytest.mark.parametrize("hardware", ["rtx3090", "cpu"])
def test_low_memory_needs_less_than_without_any_of_its_choices(hardware) -> None:
    asked = (*BERT, "batch.per_device=4", f"hardware={hardware}")
    plan = planned(LOW, *asked)
    assert peak(plan) < 0.7 * peak(planned(*asked))
    options = {k: v for k, v in chosen(plan).items() if k in ("optimizer", "memory", "kernels")}
    assert options["optimizer"] == "adafactor"
    assert options["memory"] == "checkpointing"
    for group in options:
        rest = [f"{key}={value}" for key, value in chosen(plan).items() if key != group]
        assert peak(planned(*asked, *rest)) > peak(plan)
        assert "without it" in said(plan, group).reason


@pytest.mark.slow
def test_low_memory_skips_checkpointing_without_savings() -> None:
    """One short sample: nearly all of the memory is states, and recomputation saves none of it."""
    plan = planned(LOW, *BERT, "data.seq_len=512", "batch.per_device=4", "hardware=h200")
    tiny = planned(LOW, *BERT[:3], "data.seq_len=8", "batch.per_device=1", "hardware=h200")
    assert plan.config.memory.checkpointing.value == "full"
    assert tiny.config.memory.checkpointing.value == "off"


@pytest.mark.slow
def test_low_memory_reduces_the_micro_batch_last() -> None:
    long = (LOW, "model=llama_1b", "data=synthetic", "data.seq_len=16384")
    asked = (*long, "hardware=a100_40")
    plan = planned(*asked)
    assert plan.choices["batch"] == "auto"
    assert forecast(plan).verdict is not Verdict.does_not_fit
    assert plan.batch.per_device < 8
    assert plan.batch.samples_per_step == 8, "those of a step stay"
    assert "needed at batch.per_device=8" in said(plan, "batch").reason
    typed = planned(*asked, "batch.per_device=8")
    assert typed.batch.per_device == 8
    assert forecast(typed).verdict is Verdict.does_not_fit
    assert "batch" not in chosen(planned(*long, "hardware=h200"))


@pytest.mark.slow
def test_low_memory_keeps_the_batch_if_smaller_batches_need_more() -> None:
    """Gradients of 7 B parameters are kept from one piece to the next."""
    asked = (LOW, *SEVEN[:2], "data.seq_len=512", "precision=bf16", "hardware=rtx3090")
    assert peak(planned(*asked, "batch=auto")) > peak(planned(*asked, "batch=fixed"))
    assert "batch" not in chosen(planned(*asked))


ADAPTERS = (LOW, "model=llama_1b", "data=synthetic", "peft=lora")


@pytest.mark.slow
@pytest.mark.parametrize(("hardware", "half"), [("rtx3090", "bf16"), ("v100_16", "fp16")])
def test_low_memory_keeps_frozen_weights_in_16_bits(hardware, half, packages) -> None:
    packages("peft", "bitsandbytes", "torchao")
    plan = planned(*ADAPTERS, f"hardware={hardware}")
    assert plan.choices["precision"] == half
    assert plan.compute.frozen == {"bf16": "bfloat16", "fp16": "float16"}[half]
    assert plan.choices["optimizer"] == "adamw", "states of adapters are not worth another training"
    assert 1.4 * peak(plan) < peak(planned(*ADAPTERS, "precision=fp32", f"hardware={hardware}"))


@pytest.mark.slow
def test_combination_with_free_memory_is_preferred(packages) -> None:
    """The fused loss saves nothing of the expected peak, and something of the highest one."""
    packages()
    asked = (LOW, "model=llama_1b", "data=synthetic", "data.seq_len=256")
    mild = planned(*asked, "hardware=h200")
    fused = planned(*asked, "kernels=fused_linear_cross_entropy", "hardware=h200")
    assert mild.choices["kernels"] == "none"
    assert peak(mild) == peak(fused)
    highest = [forecast(plan).peak.high for plan in (fused, mild)]
    assert highest[0] < highest[1]
    plan = planned_with(sum(highest) // 2, *asked)
    assert plan.choices["kernels"] == "fused_linear_cross_entropy"
    assert forecast(plan).verdict is Verdict.fits


def test_low_memory_uses_8_bit_adam_if_adafactor_is_unsuitable(packages) -> None:
    packages("bitsandbytes", "deepspeed")
    ranks = ("distributed=zero2", "distributed.num_processes=1")
    plan = planned(LOW, *BERT, *ranks, "hardware=h100")
    assert plan.choices["optimizer"] != "adafactor"


@pytest.mark.slow
def test_fitting_model_is_unchanged() -> None:
    plan = planned(LARGE, *BERT, "hardware=h200")
    assert set(chosen(plan)) == {"precision", "batch", "memory forecast"}
    assert said(plan, "memory forecast").reason.startswith(f"{LARGE}: fits: ")


@pytest.mark.slow
def test_first_fitting_option_is_chosen(packages) -> None:
    """7 billion parameters: 16 bytes each do not fit into 80 GB, 8 bytes do."""
    packages("torchao", "bitsandbytes", "deepspeed")
    plan = planned(LARGE, *SEVEN, "hardware=h100")
    assert forecast(planned(*SEVEN, "hardware=h100")).verdict is Verdict.does_not_fit
    assert forecast(plan).verdict is Verdict.fits
    assert plan.choices["precision"] == "bf16_pure"
    assert plan.choices["optimizer"] == "adamw_bf16_sr"
    assert plan.choices["memory"] == plan.choices["offload"] == "none"
    assert "without it" in said(plan, "precision").reason


@pytest.mark.slow
def test_missing_packages_change_the_choice_and_are_named(packages) -> None:
    packages("deepspeed")
    plan = planned(LARGE, *SEVEN, "hardware=h100")
    assert plan.choices["optimizer"] == "adamw"
    # ZeRO-2 with its optimizer on the host is only tight: the high end is 155 GiB.
    assert plan.choices["offload"] == "params_cpu"
    packages()
    alone = planned(LARGE, *SEVEN, "hardware=h100")
    assert alone.choices["offload"] == "none"
    said(alone, "memory forecast")


@pytest.mark.slow
def test_optimizer_in_backward_is_chosen_only_without_clipping(packages) -> None:
    """Clipping is part of the training: no recipe switches it off."""
    packages()
    asked = (LARGE, *SEVEN, "batch.target=1", "hardware=a100_40")
    clipped = planned(*asked)
    free = planned(*asked, "train.max_grad_norm=null")
    assert not clipped.config.memory.optimizer_in_backward
    assert clipped.config.train.max_grad_norm == 1.0
    assert free.config.memory.optimizer_in_backward


@pytest.mark.slow
def test_model_too_large_for_every_option_is_reported(packages) -> None:
    packages()
    asked = (LARGE, "model=mixtral_8x7b", "data=synthetic", "hardware=t4")
    plan = planned(*asked)
    lost = "no known technique makes it fit"
    assert lost in said(plan, "memory forecast").reason
    assert "peft=qlora" in said(plan, "memory forecast").reason
    packages("peft", "bitsandbytes")
    adapted = said(planned(*asked, "peft=qlora"), "memory forecast").reason
    assert lost in adapted
    assert "peft=qlora" not in adapted
    assert forecast(plan).verdict is Verdict.does_not_fit


def test_combinations_are_ranked() -> None:
    free = Technique("a=1", "", published=Published(1.0, ""))
    slow, unknown = replace(free, published=Published(1.3, "")), replace(free, published=None)
    changing = replace(free, numerics=Numerics.reduced)
    order = [(), (free,), (changing,), (free, changing), (slow,), (free, slow), (unknown,)]
    assert sorted(reversed(order), key=cost_of) == order
