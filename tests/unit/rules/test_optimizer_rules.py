"""Without the rules about optimizers: what really happens to who does not heed them."""

import pytest
import torch
from unit.plan.cases import SYNTHETIC, plan_of
from unit.rules.cases_optimizer import NARROW
from unit.rules.devices import CPU, V100
from unit.training.model.plans import hand_plan

from eke.config.compose import compose
from eke.models.sizes import state_bytes
from eke.rules import Facts, check
from eke.rules.device import NEEDS
from eke.training.model.build_model import build_model
from eke.training.optimizer.build_optimizer import (
    build_optimizer,
    is_quantised,
    num_paged_bytes,
    state_tensors,
)


def found(*overrides, device=CPU):
    refused, warned = check(Facts(compose(list(overrides)).config, device))
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


def test_on_a_cpu_nothing_is_paged() -> None:
    assert num_paged_bytes(stepped("optimizer=paged_adamw_8bit")) == 0


@pytest.mark.parametrize("option", ["adamw_8bit", "lion_8bit"])
def test_of_small_tensors_nothing_is_quantised(option) -> None:
    optimizer = stepped(f"optimizer={option}", *NARROW)
    assert not any(is_quantised(state) for state in optimizer.state.values())
    assert "all_tensors_are_too_small_for_8_bits" in found(f"optimizer={option}", *NARROW)
    assert any(is_quantised(s) for s in stepped(f"optimizer={option}").state.values())
    assert "all_tensors_are_too_small_for_8_bits" not in found(f"optimizer={option}")


def test_torchao_quantises_whole_blocks_alone() -> None:
    rule = "all_tensors_are_too_small_for_8_bits"
    assert rule in found("optimizer=adamw_torchao_8bit", "optimizer.block_size=4095")
    assert rule not in found("optimizer=adamw_torchao_8bit", "optimizer.block_size=4096")


@pytest.mark.parametrize("option", ["galore", "apollo"])
def test_from_the_rank_that_the_rule_names_on_states_are_no_smaller(option) -> None:
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


def test_with_float32_weights_there_is_nothing_to_round() -> None:
    config = hand_plan("optimizer=adamw_bf16_sr")
    same = hand_plan("optimizer=adamw")
    first, second = (state_bytes(p.config).optimizer for p in (config, same))
    assert first == second, "nor are states smaller than AdamW's"


def test_on_a_gpu_paging_compiling_and_apex_are_let_through() -> None:
    assert not {"paging_needs_cuda"} & set(found("optimizer=paged_adamw_8bit", device=V100))
    assert not {"torchao_needs_volta"} & set(found("optimizer=adamw_torchao_8bit", device=V100))
    assert "apex_needs_cuda" not in found("optimizer=adamw_apex_fused", device=V100)


def test_schedule_free_with_a_constant_rate_is_not_warned_about() -> None:
    assert "schedule_free_has_no_schedule" not in found(
        "optimizer=schedule_free", "schedule=constant"
    )


@pytest.mark.parametrize("option", [o for group, o in NEEDS if group == "optimizer"])
def test_the_package_of_each_optimizer_is_named(option, monkeypatch) -> None:
    monkeypatch.setattr("eke.rules.device.find_spec", lambda name: None)
    problem = found(f"optimizer={option}")["package_missing"]
    assert (problem.key, problem.value) == ("optimizer", option)
    assert str(problem.fix).startswith("optimizer=adamw   (or: ")


@pytest.mark.parametrize(
    ("rule", "device", "fix"),
    [
        ("apex_needs_cuda", CPU, "optimizer.implementation=fused"),
        ("package_missing", V100, "optimizer.implementation=auto   (or: build it"),
    ],
)
def test_an_implementation_without_its_device_or_package(rule, device, fix, monkeypatch) -> None:
    monkeypatch.setattr("eke.rules.device.find_spec", lambda name: None)
    problem = found("optimizer.implementation=apex", device=device)[rule]
    assert (problem.key, problem.value) == ("optimizer", "adamw_apex_fused")
    assert str(problem.fix).startswith(fix)


def test_another_project_of_that_name_is_not_nvidias(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("raise RuntimeError('imported')")
    assert "package_missing" in found("optimizer=adamw_apex_fused", device=V100)
    (tmp_path / "apex" / "optimizers").mkdir()
    assert "package_missing" not in found("optimizer=adamw_apex_fused", device=V100)
