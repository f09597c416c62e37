"""DeepSpeed's settings from the configuration: written out, so that a change of them is seen."""

import pytest
from unit.plan.cases import CPU, GPU, SYNTHETIC, config_of, plan_config

BASE = (*SYNTHETIC, "model=tiny", "batch.per_device=2", "batch.accumulation=3")
WIDTH = 128  # of model=tiny


def settings(*overrides: str, device=CPU):
    return plan_config(config_of(*BASE, *overrides), device).deepspeed


def test_run_without_zero_has_no_deepspeed_settings() -> None:
    assert settings("distributed=ddp") is None


def test_zero1_settings_match() -> None:
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


def test_zero3_gpu_settings_match() -> None:
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


NVME = ("distributed=zero3", "offload=nvme", "offload.path=/disk")


def test_nvme_optimizer_settings_match() -> None:
    found = settings(*NVME, "offload.threads=2", "offload.piece_numbers=1000000", device=GPU)
    zero = found["zero_optimization"]
    assert zero["sub_group_size"] == 1_000_000
    assert zero["offload_optimizer"] == {
        "device": "nvme",
        "nvme_path": "/disk",
        "pin_memory": True,
        "buffer_count": 4,
    }
    assert "offload_param" not in zero
    assert found["aio"] == {
        "block_size": 1048576,
        "queue_depth": 8,
        "intra_op_parallelism": 2,
        "single_submit": False,
        "overlap_events": True,
        "use_gds": False,
    }


@pytest.mark.parametrize(
    ("place", "wanted"),
    [
        ("host", {"device": "cpu", "pin_memory": False}),
        (
            "disk",
            {
                "device": "nvme",
                "nvme_path": "/disk",
                "pin_memory": False,
                "buffer_count": 5,
                "buffer_size": 352 * WIDTH // 2,  # model=tiny's intermediate_size, in two parts
                "max_in_cpu": 0,
            },
        ),
    ],
)
def test_offloaded_weights_use_the_configured_device(place, wanted) -> None:
    found = settings(*NVME, f"offload.weights={place}")
    assert found["zero_optimization"]["offload_param"] == wanted


def test_disabled_clipping_is_zero() -> None:
    assert settings("distributed=zero2", "train.max_grad_norm=null")["gradient_clipping"] == 0.0


@pytest.mark.parametrize(
    ("offload", "implementation"),
    [("none", "fused"), ("optimizer_cpu", "deepspeed_cpu"), ("nvme", "deepspeed_cpu")],
)
def test_offload_names_the_host_optimizer(offload, implementation) -> None:
    path = ("offload.path=/disk",) if offload == "nvme" else ()
    plan = plan_config(config_of(*BASE, "distributed=zero3", f"offload={offload}", *path))
    assert plan.compute.optimizer_implementation == implementation
    reasons = {d.key: d for d in plan.decisions}
    assert reasons["optimizer implementation"].value == implementation
