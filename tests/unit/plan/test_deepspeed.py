"""DeepSpeed's settings from the configuration: written out, so that a change of them is seen."""

import pytest
from unit.plan.cases import CPU, GPU, SYNTHETIC, config_of, plan_config

BASE = (*SYNTHETIC, "model=tiny", "batch.per_device=2", "batch.accumulation=3")
WIDTH = 128  # of model=tiny


def settings(*overrides: str, device=CPU):
    return plan_config(config_of(*BASE, *overrides), device).deepspeed


def test_without_zero_there_are_none() -> None:
    assert settings("distributed=ddp") is None


def test_zero1_in_full() -> None:
    assert settings("distributed=zero1", "train.max_grad_norm=0.5") == {
        "train_batch_size": 12,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.5,
        "zero_optimization": {
            "stage": 1,
            "overlap_comm": False,
            "reduce_bucket_size": WIDTH * WIDTH,
            "allgather_bucket_size": WIDTH * WIDTH,
        },
        "fp16": {"enabled": False},
        "bf16": {"enabled": False},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def test_zero3_in_full_on_gpus() -> None:
    found = settings("distributed=zero3", "offload=params_cpu", device=GPU)
    there = {"device": "cpu", "pin_memory": True}
    assert found["zero_optimization"] == {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": WIDTH * WIDTH,
        "stage3_prefetch_bucket_size": WIDTH * WIDTH * 9 // 10,
        "stage3_param_persistence_threshold": 10 * WIDTH,
        "offload_optimizer": there,
        "offload_param": there,
    }


def test_no_clipping_is_zero() -> None:
    assert settings("distributed=zero2", "train.max_grad_norm=null")["gradient_clipping"] == 0.0


@pytest.mark.parametrize(
    ("offload", "implementation"), [("none", "fused"), ("optimizer_cpu", "deepspeed_cpu")]
)
def test_offload_names_the_optimizer_that_runs_on_the_host(offload, implementation) -> None:
    plan = plan_config(config_of(*BASE, "distributed=zero2", f"offload={offload}"))
    assert plan.compute.optimizer_implementation == implementation
    reasons = {d.key: d for d in plan.decisions}
    assert reasons["optimizer implementation"].value == implementation
