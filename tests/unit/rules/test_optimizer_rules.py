"""Without the rules about optimizers: what really happens to who does not heed them."""

import pytest
import torch
from unit.plan.cases import SYNTHETIC, plan_of
from unit.rules.devices import CPU, V100
from unit.training.model.plans import hand_plan

from eke.config.compose import compose
from eke.models.sizes import state_bytes
from eke.rules import RuleInputs, check
from eke.training.model.build_model import build_model
from eke.training.optimizer.build_optimizer import (
    build_optimizer,
    is_quantised,
    num_paged_bytes,
    state_tensors,
)

NARROW = ("model.hidden_size=32", "model.intermediate_size=64", "model.num_attention_heads=2")
"""Matrices of at most 2048 numbers inside the layers."""


def found(*overrides, device=CPU):
    refused, warned = check(RuleInputs(compose(list(overrides)).config, device))
    return {p.id: p for p in refused + warned}


def stepped(*overrides):
    """An optimizer after a step with gradients of ones."""
    plan = plan_of(*SYNTHETIC, *overrides)
    model = build_model(plan, torch.device("cpu"))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer = build_optimizer(plan, model)
    optimizer.step()
    return optimizer


def num_bytes(optimizer):
    return sum(t.nbytes for t in state_tensors(optimizer))


def test_paged_optimizer_does_not_page_on_a_cpu() -> None:
    assert num_paged_bytes(stepped("optimizer=paged_adamw_8bit")) == 0


@pytest.mark.parametrize("option", ["adamw_8bit", "lion_8bit"])
def test_small_tensors_are_not_quantized(option) -> None:
    optimizer = stepped(f"optimizer={option}", *NARROW)
    assert not any(is_quantised(state) for state in optimizer.state.values())
    assert "all_tensors_are_too_small_for_8_bits" in found(f"optimizer={option}", *NARROW)
    assert any(is_quantised(s) for s in stepped(f"optimizer={option}").state.values())
    assert "all_tensors_are_too_small_for_8_bits" not in found(f"optimizer={option}")


def test_torchao_quantizes_only_complete_blocks() -> None:
    rule = "all_tensors_are_too_small_for_8_bits"
    assert rule in found("optimizer=adamw_torchao_8bit", "optimizer.block_size=4095")
    assert rule not in found("optimizer=adamw_torchao_8bit", "optimizer.block_size=4096")


@pytest.mark.parametrize("option", ["galore", "apollo"])
def test_projected_states_are_not_smaller_from_the_rule_rank(option) -> None:
    """The tiny model's narrowest matrices are 128 x 128: 86 is two thirds of that."""
    whole = num_bytes(stepped("optimizer=adamw"))
    square = 16 * (2 * 128 * 128 * 4)  # four matrices of each of four layers, two moments
    for rank, saves in [(85, True), (86, False)]:
        problem = found(f"optimizer={option}", f"optimizer.rank={rank}").get("rank_saves_nothing")
        assert (problem is None) is saves
        assert (3 * rank * 128 * 4 < 2 * 128 * 128 * 4) is saves
    low = num_bytes(stepped(f"optimizer={option}", "optimizer.rank=86"))
    wide = num_bytes(stepped(f"optimizer={option}", "optimizer.rank=1"))
    assert wide < low
    assert low > whole - 12 * (2 * 128 * 352 * 4), f"{square} bytes of square matrices only grew"


def test_float32_weights_need_no_stochastic_rounding() -> None:
    config = hand_plan("optimizer=adamw_bf16_sr")
    same = hand_plan("optimizer=adamw")
    first, second = (state_bytes(p.config).optimizer for p in (config, same))
    assert first == second, "nor are states smaller than AdamW's"


@pytest.mark.parametrize(
    ("rule", "typed"),
    [
        ("paging_needs_cuda", ["optimizer=paged_adamw_8bit"]),
        ("torchao_needs_volta", ["optimizer=adamw_torchao_8bit"]),
        ("apex_needs_cuda", ["optimizer=adamw_apex_fused"]),
        ("schedule_free_has_no_schedule", ["optimizer=schedule_free", "schedule=constant"]),
    ],
)
def test_gpu_is_accepted(rule, typed) -> None:
    assert rule not in found(*typed, device=V100)


@pytest.mark.parametrize(
    ("rule", "device", "fix"),
    [
        ("apex_needs_cuda", CPU, "optimizer.implementation=fused"),
        ("package_missing", V100, "optimizer.implementation=auto   (or: build it"),
    ],
)
def test_implementation_without_device_or_package_is_rejected(
    rule, device, fix, monkeypatch
) -> None:
    monkeypatch.setattr("eke.rules.requirements.find_spec", lambda name: None)
    problem = found("optimizer.implementation=apex", device=device)[rule]
    assert (problem.key, problem.value) == ("optimizer", "adamw_apex_fused")
    assert str(problem.fix).startswith(fix)


def test_foreign_apex_package_is_not_accepted(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("raise RuntimeError('imported')")
    assert "package_missing" in found("optimizer=adamw_apex_fused", device=V100)
    (tmp_path / "apex" / "optimizers").mkdir()
    assert "package_missing" not in found("optimizer=adamw_apex_fused", device=V100)
