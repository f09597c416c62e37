"""Without the rules about processes, offloading and adapters: what really goes wrong."""

import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from trained import steps_of
from unit.plan.cases import config_of
from unit.rules.without import light_plan, trained
from unit.training.model.plans import hand_plan
from unit.training.model.steps import make_inputs

from eke.hardware import DEVICES
from eke.models.sizes import model_size, shared_state_bytes, state_bytes
from eke.rules import RuleInputs
from eke.rules.peft import _expert_bytes
from eke.training.batches.dataset import build_data
from eke.training.distributed.ranks import join_ranks
from eke.training.model.adapters import apply_peft
from eke.training.model.build_model import build_model
from eke.training.model.checkpointing import apply_checkpointing

CPU = torch.device("cpu")


def test_single_rank_trains_its_share_of_the_planned_samples(tmp_path) -> None:
    job = trained(tmp_path, "distributed.num_processes=2", "batch.per_device=2")
    trained_on = sum(b.num_samples for step in job.data.train_steps(0) for b in step)
    assert trained_on == job.plan.batch.samples_per_step * len(steps_of(job)) / 2


def test_unpadded_row_cannot_be_split() -> None:
    """DataParallel scatters by torch.chunk: the second GPU gets nothing."""
    plan = light_plan("data.lengths=uniform", "data.packing=padding_free")
    batch = next(build_data(plan).train_steps(0))[0]
    assert batch.num_samples == 4
    assert len(batch.inputs["input_ids"].chunk(2)) == 1


def test_process_without_its_own_gpu_fails(monkeypatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(RuntimeError, match="no GPU for process 1"):
        join_ranks(replace(hand_plan(), device=DEVICES["h200"]))


def test_processes_on_one_core_wait_for_each_other() -> None:
    """Two of them that compute for 0.2 s each, on the same core, take 0.4 s."""
    code = (
        "import os, time\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "while time.process_time() < 0.2: pass\n"
    )
    began = time.monotonic()
    children = [subprocess.Popen([sys.executable, "-S", "-c", code]) for _ in range(2)]
    assert [child.wait() for child in children] == [0, 0]
    assert time.monotonic() - began > 0.39


def test_zero_with_one_process_keeps_an_extra_copy() -> None:
    alone, zero = (
        config_of(*more) for more in ((), ("distributed=zero1", "distributed.num_processes=1"))
    )
    size = model_size(alone)
    plain = state_bytes(alone).total
    assert shared_state_bytes(zero, size, False).total >= plain + 4 * size.num_parameters


def test_optimizer_offload_from_a_cpu_stays_on_the_cpu() -> None:
    plan = light_plan("distributed=zero2", "distributed.num_processes=1", "offload=optimizer_cpu")
    assert plan.deepspeed["zero_optimization"]["offload_optimizer"]["device"] == plan.device.kind


def test_deepspeed_offloads_weights_only_at_stage_3() -> None:
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    def mentions(module) -> bool:
        with open(module.__file__) as file:
            return "offload_param" in file.read()

    assert mentions(stage3)
    assert not mentions(stage_1_and_2)


def test_deepspeed_adam_requires_a_compiler(tmp_path, monkeypatch) -> None:
    from deepspeed.ops.op_builder import CPUAdamBuilder

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises((RuntimeError, OSError, subprocess.CalledProcessError)):
        CPUAdamBuilder().load(verbose=False)


def test_random_weights_stay_random_with_adapters(tmp_path) -> None:
    job = trained(tmp_path, "peft=lora", "optimizer.lr=0.1")
    start = build_model(job.plan, CPU).state_dict()
    end = {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): parameter
        for name, parameter in job.bare_model.named_parameters()
    }
    kept = start.keys() & end.keys()
    assert len(kept) == len(start) - 1, "but for the output projection, which is tied"
    assert all(torch.equal(start[name], end[name]) for name in kept)


def test_adapters_of_half_width_rank_are_not_smaller() -> None:
    sizes = {}
    for rank in (63, 64):
        plan = hand_plan("peft=lora", f"peft.r={rank}", "peft.target_modules=[q_proj]")
        model = apply_peft(plan, build_model(plan, CPU))
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        adapted = sum(
            p.numel() for n, p in model.named_parameters() if n.endswith("q_proj.base_layer.weight")
        )
        sizes[rank] = trainable / adapted
    assert sizes[63] < 1 <= sizes[64]


@pytest.mark.parametrize("peft", [("peft=qlora",), ("peft=lora", "peft.experts=true")], ids=str)
def test_full_expert_weights_are_kept_for_backward(peft) -> None:
    kept = {}
    for memory in ("none", "checkpointing"):
        plan = hand_plan("model=tiny_moe", *peft, f"memory={memory}")
        model = apply_peft(plan, build_model(plan, CPU))
        apply_checkpointing(plan, model)
        shape = (plan.config.model.num_local_experts,)
        found = {}

        def pack(tensor, shape=shape, found=found):
            if tensor.dim() == 3 and tensor.shape[:1] == shape:
                found[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            model(**make_inputs(model.get_base_model()))
        kept[memory] = sum(t.untyped_storage().nbytes() for t in found.values())
    experts = _expert_bytes(RuleInputs(plan.config, DEVICES["h200"]))
    assert kept["none"] >= experts
    assert kept["checkpointing"] == 0
