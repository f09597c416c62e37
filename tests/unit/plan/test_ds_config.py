"""A user's own ds_config.json: laid over eke's settings, or refused with both values."""

import json

import pytest
from unit.plan.cases import SYNTHETIC, config_of, plan_config

from eke.common.errors import ConfigError

BASE = (
    *SYNTHETIC, "model=tiny", "distributed=zero2", "batch.per_device=2", "batch.accumulation=3",
    "optimizer.lr=1e-3", "schedule=linear",
)  # fmt: skip


@pytest.fixture
def plan_with(tmp_path):
    """Content of the file -> plan."""

    def make(content, *overrides):
        path = tmp_path / "ds.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return plan_config(config_of(*BASE, f"distributed.deepspeed_config={path}", *overrides))

    return make


HF_AUTO = {
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto"}},
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
"""The shape of Hugging Face's own example for ZeRO-2."""


def test_hugging_face_example_is_accepted(plan_with) -> None:
    plan = plan_with(HF_AUTO)
    found = plan.deepspeed
    assert found["train_batch_size"] == 12
    assert found["gradient_accumulation_steps"] == 3
    assert found["zero_optimization"]["reduce_bucket_size"] == 128 * 128
    assert found["zero_optimization"]["allgather_bucket_size"] == 2e8
    assert found["zero_optimization"]["overlap_comm"] is True
    assert found["fp16"] == {"enabled": False, "loss_scale": 0}
    assert not {"optimizer", "scheduler"} & set(found)
    assert not plan.warnings


CONTRADICTIONS = {
    "micro-batch": ({"train_micro_batch_size_per_gpu": 4}, "batch.per_device=4"),
    "accumulation": ({"gradient_accumulation_steps": 8}, "batch.accumulation=8"),
    "batch": ({"train_batch_size": 64}, "batch.target=64"),
    "clipping": ({"gradient_clipping": 0.25}, "train.max_grad_norm=0.25"),
    "stage": ({"zero_optimization": {"stage": 3}}, "distributed=zero3"),
    "stage 0": ({"zero_optimization": {"stage": 0}}, "distributed=ddp"),
    "fp16": ({"fp16": {"enabled": True}}, "precision=fp16"),
    "bf16": ({"bf16": {"enabled": True}}, "precision=bf16_pure"),
    "offload": (
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "offload=optimizer_cpu",
    ),
    "optimizer": ({"optimizer": {"type": "Lion"}}, "optimizer=lion"),
    "lr": ({"optimizer": {"type": "AdamW", "params": {"lr": 3e-5}}}, "optimizer.lr=3e-05"),
    "betas": ({"optimizer": {"params": {"betas": [0.9, 0.95]}}}, "optimizer.beta2=0.95"),
    "schedule": ({"scheduler": {"type": "WarmupLR"}}, "schedule=constant"),
    "autocast": ({"torch_autocast": {"enabled": True}}, "remove torch_autocast"),
    "unfilled": ({"flops_profiler": {"profile_step": "auto"}}, "remove flops_profiler"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "fix"), CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys())
def test_contradicting_deepspeed_value_is_rejected_with_a_fix(content, fix, plan_with) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_with(content)
    (problem,) = caught.value.problems
    assert str(problem.fix).startswith(fix)
    assert problem.key == "distributed.deepspeed_config"


INFINITY = {
    "zero_optimization": {
        "stage": 3,
        "sub_group_size": 1e9,
        "offload_optimizer": {
            "device": "nvme",
            "nvme_path": "/local_nvme",
            "pin_memory": True,
            "buffer_count": 4,
            "fast_init": False,
        },
    },
    "aio": {"block_size": 262144, "queue_depth": 32, "single_submit": False},
}
"""The shape of DeepSpeed's and Hugging Face's examples for ZeRO-Infinity."""

SAME = ("distributed=zero3", "offload=nvme", "offload.path=/local_nvme",
        "offload.piece_numbers=1000000000", "offload.block_bytes=262144",
        "offload.queue_depth=32")  # fmt: skip


def test_nvme_example_is_accepted_with_equal_settings(plan_with) -> None:
    found = plan_with(INFINITY, *SAME).deepspeed
    assert found["zero_optimization"]["offload_optimizer"]["fast_init"] is False
    assert found["aio"]["intra_op_parallelism"] == 1


@pytest.mark.parametrize("key", [key.split("=")[0] for key in SAME[2:]])
def test_contradicting_nvme_example_is_rejected_with_a_fix(key, plan_with) -> None:
    said = next(one for one in SAME if one.startswith(key))
    changed = f"{key}=/elsewhere" if key == "offload.path" else f"{key}=1000000"
    if key == "offload.queue_depth":
        changed = f"{key}=2"
    with pytest.raises(ConfigError) as caught:
        plan_with(INFINITY, *(changed if one == said else one for one in SAME))
    (problem,) = caught.value.problems
    assert str(problem.fix).startswith(said)


def test_disk_settings_without_offload_are_ignored(plan_with) -> None:
    """Hugging Face's example for ZeRO-3 has a sub_group_size."""
    theirs = {"zero_optimization": {"stage": 3, "sub_group_size": 1e9}}
    found = plan_with(theirs, "distributed=zero3").deepspeed
    assert found["zero_optimization"]["sub_group_size"] == 1e9


def test_all_contradictions_are_listed(plan_with) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_with({"train_batch_size": 64, "scheduler": {"type": "OneCycle"}})
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize("content", ["{", "[]", '"zero"'])
def test_invalid_deepspeed_settings_are_rejected(content, plan_with) -> None:
    with pytest.raises(ConfigError, match=r"deepspeed_config"):
        plan_with(content)


def test_missing_deepspeed_file_is_rejected() -> None:
    with pytest.raises(ConfigError, match="No such file"):
        plan_config(config_of(*BASE, "distributed.deepspeed_config=/none.json"))


def test_unknown_deepspeed_key_is_passed_with_a_warning(plan_with) -> None:
    plan = plan_with({"stepps_per_print": 5})
    assert plan.deepspeed["stepps_per_print"] == 5
    assert "stepps_per_print" in plan.warnings[0]


def test_run_id_depends_on_deepspeed_content_only(plan_with, tmp_path) -> None:
    first = plan_with({"steps_per_print": 5}).run_id
    other = tmp_path / "other.json"
    other.write_text('{"steps_per_print": 5}')
    moved = plan_config(config_of(*BASE, f"distributed.deepspeed_config={other}"))
    assert moved.run_id == first
    assert plan_with({"steps_per_print": 6}).run_id != first
